"""Triton kernels run on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the test's kernels run: those that g++ compiles on the CPU. Skips Triton's if it is not
    installed."""
    compiled = request.node.get_closest_marker("compiler") is not None
    if not compiled:
        pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    with torch.device("cuda" if torch.cuda.is_available() and not compiled else "cpu") as device:
        yield str(device)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """``torch.set_num_threads``, until the test's end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def unwritten(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no program has written is nan."""
    empty = torch.Tensor.new_empty

    def poisoned(x: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = empty(x, *shape, **options)
        return torch.full_like(made, torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


@pytest.fixture
def untouched_memory(
    device: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches leave alone what kernels do not touch, so huge tensors cost hardly any memory.

    The interpreter would copy them back whole, here onto themselves.
    """
    if device == "cpu" and request.node.get_closest_marker("compiler") is None:
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
