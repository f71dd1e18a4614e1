"""Names of what is imported late: each is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from kvserve.late import Late, LateModule, Made
from kvserve.scheduler.compression.kinds import KINDS
from kvserve.scheduler.triggers.trigger import EventKind

PACKAGE = Path(__file__).parents[1] / "kvserve"


def late_names() -> Iterator[str]:
    """``module:name`` of each ``Late("...")``, and of what is taken of each ``LateModule``."""
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        if "Late" not in text or file.name == "late.py":
            continue
        modules: dict[str, str] = {}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                place = _place(node.value, "LateModule")
                modules |= {target.id: place for target in node.targets if place}  # type: ignore[attr-defined]
            if isinstance(node, ast.Call) and (place := _place(node, "Late")):
                yield place
            taken = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if taken and node.value.id in modules:  # type: ignore[attr-defined]
                yield f"{modules[node.value.id]}:{node.attr}"  # type: ignore[attr-defined]


def _place(call: ast.Call, name: str) -> str:
    """The text that a call of ``name`` is given."""
    named = isinstance(call.func, ast.Name) and call.func.id == name
    first: Any = call.args[0] if named and call.args else None
    return str(first.value) if isinstance(first, ast.Constant) else ""


def test_each_late_name_is_there() -> None:
    names = set(late_names())
    assert len(names) > 40 and "kernels.move.move_kv_triton:move_kv_triton" in names
    for name in names:
        assert callable(resolve_name(f"kvserve.{name}")), name


def test_each_kind_of_event_has_both_halves() -> None:
    assert KINDS.keys() == set(EventKind)
    for host, device in KINDS.values():
        for method in ("outcomes", "rank", "take_blocks", "next_event"):
            assert callable(getattr(host.function, method))
        assert callable(device.function.observe) and callable(device.function.apply)


def test_what_is_late_is_found_once_and_made_once() -> None:
    add = Late("scheduler.arrays:ragged_arange")
    assert add.function is add.function and LateModule("scheduler.arrays").ragged_arange is not add
    module = LateModule("scheduler.arrays")
    assert module.ragged_arange is module.ragged_arange
    with pytest.raises(AttributeError, match="nothing"):
        _ = Late("scheduler.arrays:nothing").function
    made = Made(list[int])
    assert made.made is None and made() is made() is made.made
