"""Which launcher an entry point takes on CUDA, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.move_kv import (
    compact_kv,
    compact_kv_torch,
    gather_keys,
    gather_keys_torch,
    gather_queries,
    gather_queries_torch,
)
from kvserve.kernels.scores.window_scores import window_scores, window_scores_torch


class OnCuda(torch.Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


def on_cuda(*shape: int) -> Tensor:
    return torch.randn(shape).as_subclass(OnCuda)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def launch(kernel: Kernel, *args: Any, **options: Any) -> None:
        names.append(kernel.source.__name__)

    monkeypatch.setattr(Kernel, "launch", launch)
    return names


@pytest.mark.parametrize(("dim", "fits"), [(64, True), (80, False), (8, False)])
def test_a_head_dimension_that_no_kernel_knows_is_torch_s(
    dim: int, fits: bool, launched: list[str]
) -> None:
    """Events run on whatever attention runs on: all of them by torch, not half of them refused."""
    cache, slots = on_cuda(5, 2, 2, 4, 2, dim), torch.randint(4, 20, (2, 2, 6))
    log, lanes = cache.view(5, 2, 8, 2, dim), torch.arange(2)
    query, key = on_cuda(1, 2, 3, dim), on_cuda(1, 2, 7, dim)
    keys = gather_keys(cache, slots, lanes)
    queries = gather_queries(log, slots, lanes)
    scores = window_scores(query, key, 0.1)
    before = cache.clone()
    compact_kv(cache, slots, slots)
    assert launched == (["_gather", "_gather", "_log_sums", "_shares", "_compact"] if fits else [])
    if not fits:
        assert torch.equal(keys, gather_keys_torch(cache, slots, lanes))
        assert torch.equal(queries, gather_queries_torch(log, slots, lanes))
        assert torch.equal(scores, window_scores_torch(query, key, 0.1))
        compact_kv_torch(before, slots, slots)
        assert torch.equal(cache, before)
