"""Triton kernels run on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> Iterator[str]:
    """Where Triton kernels run; skips if Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield str(device)


@pytest.fixture
def untouched_memory(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches leave alone what kernels do not touch, so huge tensors cost hardly any memory.

    The interpreter would copy them back whole, here onto themselves.
    """
    if device == "cpu":
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda *_: None)
