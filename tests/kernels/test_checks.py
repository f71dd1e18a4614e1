"""Which kernels are taken on CUDA, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.score.window_scores import window_scores, window_scores_torch
from kvserve.kernels.storage import TORCH, TRITON, by_device


class OnCuda(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(shape).as_subclass(OnCuda)


@pytest.mark.parametrize(("dim", "fits"), [(64, True), (80, False), (8, False)])
def test_a_head_dimension_that_no_kernel_knows_is_torch_s(
    dim: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Events run on whatever attention runs on: all of them by torch, not half of them refused."""
    launched: list[str] = []

    def launch(kernel: Kernel, *args: Any, **options: Any) -> None:
        launched.append(kernel.source.__name__)

    monkeypatch.setattr(Kernel, "launch", launch)
    query, key = on_cuda(1, 2, 3, dim), on_cuda(1, 2, 7, dim)
    scores = window_scores(query, key, 0.1)
    assert launched == (["_log_sums", "_shares"] if fits else [])
    if not fits:
        assert torch.equal(scores, window_scores_torch(query, key, 0.1))
    for kernel, taken in by_device("cuda", dim)._asdict().items():
        always = kernel in ("store_kv", "store_queries")  # which know vectors of any size
        levels = kernel.endswith("levels") or kernel in ("few", "store_rotated")
        expected = TRITON if always or (fits and not levels) else TORCH
        assert taken is getattr(expected, kernel), kernel
    assert by_device("cpu", dim) is TORCH
