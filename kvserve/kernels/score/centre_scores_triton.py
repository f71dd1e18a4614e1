"""``centre_scores.py`` in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl


def centre_scores_triton(key: Tensor, vectors: Tensor, spread: Tensor) -> Tensor:
    """As ``centre_scores_by_head``, in float32: one pass over the keys."""
    check_head_dim(key, vectors)
    events, layers, kv_heads, length, dim = key.shape
    heads, futures = vectors.shape[2:4]
    out = torch.empty(events, layers, heads, length, dtype=torch.float32, device=key.device)
    tile = max(16, 4096 // dim)
    _scores.launch(
        (events * layers * kv_heads, -(-length // tile)),
        *(out, *(x.contiguous() for x in (key, vectors, spread)), length, layers * kv_heads),
        GROUP=heads // kv_heads,
        FUTURES=futures,
        HALF=dim // 2,
        TILE=tile,
        num_warps=4,
    )
    return out


@Kernel
def _scores(
    out,
    keys,
    vectors,
    spread,
    length,
    lanes,
    GROUP: tl.constexpr,
    FUTURES: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = place < length
    dims = tl.arange(0, HALF)
    rows = keys + (lane * length + place)[:, None] * (2 * HALF) + dims[None, :]
    low = tl.load(rows, mask=there[:, None], other=0.0).to(tl.float32)
    high = tl.load(rows + HALF, mask=there[:, None], other=0.0).to(tl.float32)
    magnitude = tl.sqrt(low * low + high * high)
    for member in range(GROUP):
        head = lane * GROUP + member
        best = tl.full([TILE], float("-inf"), tl.float32)
        for future in range(FUTURES):
            vector = vectors + (head * FUTURES + future) * (2 * HALF) + dims
            product = low * tl.load(vector)[None, :] + high * tl.load(vector + HALF)[None, :]
            best = tl.maximum(best, tl.sum(product, axis=1))
        weight = tl.load(spread + (lane % lanes * GROUP + member) * HALF + dims)
        best += tl.sum(magnitude * weight[None, :], axis=1)
        tl.store(out + head * length + place, best, mask=there)
