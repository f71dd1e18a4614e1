"""Rooms of the packages: which stands on which, no circles, and few files side by side."""

from __future__ import annotations

import pytest

from tests import import_graph as graph

# Floors from the ground up; a room imports rooms of its package on lower floors only.
FLOORS = {
    "engine": (
        ("",),  # messages
        ("policies.parts",),
        ("device", "gguf", "policies"),
        ("attention", "sampling"),
        ("models",),
        ("cache",),
        ("compression",),
        ("runner",),
        ("core",),
        ("frontend",),
    ),
    "server": (
        ("settings", "parsers"),
        ("state",),
        ("openai",),
        ("anthropic", "ui"),
        ("http",),
        ("replicas",),
        ("cli",),
        ("reference",),
    ),
    "benchmarks": (
        ("setup",),
        ("reports", "datasets", "simulator"),
        ("measuring",),
        ("commands",),
    ),
    "scheduler": (
        ("",),  # arrays, layout
        ("triggers",),
        ("messages",),
        ("blocks",),
        ("rows",),
        ("compression", "offload", "speculation"),
        ("step",),
    ),
    "kernels": (("",), ("attention", "sampling"), ("cpu",), ("events", "scores")),
}

FILES = graph.python_files(graph.PACKAGE)
ARROWS = graph.module_arrows(FILES)
PACKAGES = graph.package_names(FILES)


def floor_of(room: str) -> int:
    package, _, name = room.partition(".")
    floors = FLOORS[package]
    assert any(name in floor for floor in floors), f"{room} has no floor in tests/test_rooms.py"
    return next(i for i, floor in enumerate(floors) if name in floor)


def test_no_circle_of_modules() -> None:
    assert graph.circles(ARROWS) == []


def test_no_circle_of_rooms() -> None:
    assert graph.circles(graph.room_arrows(ARROWS, PACKAGES)) == []


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_stand_on_lower_floors(package: str) -> None:
    rooms = graph.room_arrows(ARROWS, PACKAGES)
    upward = [
        f"{room} -> {target}"
        for room, targets in rooms.items()
        for target in targets
        if room.split(".")[0] == package == target.split(".")[0]
        and floor_of(target) >= floor_of(room)
    ]
    assert upward == []


def test_the_graph_sees_circles_and_arrows() -> None:
    files = [
        ("kvserve/a/__init__.py", ""),
        ("kvserve/a/x.py", "def f():\n    from kvserve.b.y import g"),
        ("kvserve/b/__init__.py", ""),
        ("kvserve/b/y.py", "from kvserve.a import x\nimport torch"),
        ("kvserve/b/z.py", "from ..a.x import f"),
    ]
    arrows, packages = graph.module_arrows(files), graph.package_names(files)
    assert arrows["kvserve.b.z"] == {"kvserve.a.x"}
    assert graph.circles(arrows) == [{"kvserve.a.x", "kvserve.b.y"}]
    assert graph.room_arrows(arrows, packages) == {"a": {"b"}, "b": {"a"}}
