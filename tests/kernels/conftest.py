"""Triton kernels run on a GPU where there is one, else under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> Iterator[str]:
    """Where Triton kernels run; skips if Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu") as device:
        yield str(device)
