"""Move kept entries to the front of their rows, all layers and heads in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from kvserve.kernels.checks import check_head_dim, runs_triton
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.gather_kv import (
    entry_rows,
    gather_keys,
    gather_keys_triton,
    gather_values,
)

if TYPE_CHECKING:
    import triton.language as tl


def compact_kv(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries ``src`` to ``dst``, keys and values, in place.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; src, dst: int64 slots [L, Hkv, S], which are ``runs``
    runs (events) of equal length. They may overlap as entries do that move to the front in order:
    no destination is the source of a later entry of its run, or of any entry of another run. What
    goes to block 0 is not used.
    """
    if runs_triton(kv_cache):
        compact_kv_triton(kv_cache, src, dst, runs)
    else:
        compact_kv_torch(kv_cache, src, dst)


def compact_kv_torch(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """The reference: all sources are read before any destination is written."""
    block, heads, dim = kv_cache.shape[3:]
    flat = kv_cache.view(-1, dim)
    rows = entry_rows(kv_cache, src).view(-1)
    keys, values = flat.index_select(0, rows), flat.index_select(0, rows + block * heads)
    rows = entry_rows(kv_cache, dst).view(-1)
    flat.index_copy_(0, rows, keys)
    flat.index_copy_(0, rows + block * heads, values)


def compact_kv_triton(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    check_head_dim(kv_cache)
    num_blocks, layers, _, block, heads, dim = kv_cache.shape
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    _compact.launch(
        (src.shape[0] * src.shape[1], runs),
        kv_cache,
        src.contiguous(),
        dst.contiguous(),
        src.shape[-1] // runs,
        src.shape[1],
        layers,
        num_blocks * block,
        *kv_cache.stride()[:4],
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=max(16, 4096 // dim),
        num_warps=4,
    )


class MoveKernels(NamedTuple):
    """One implementation of gathering keys and values, and of moving both."""

    keys: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    values: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    move: Callable[[Tensor, Tensor, Tensor, int], None]


BY_DEVICE = MoveKernels(gather_keys, gather_values, compact_kv)
"""Triton's on CUDA, torch's elsewhere."""
TRITON = MoveKernels(gather_keys_triton, gather_values, compact_kv_triton)
"""Values are gathered by torch: few policies read them."""


@Kernel
def _compact(
    cache,
    src,
    dst,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    value_stride,
    entry_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0)
    first = (lane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * length
    layer, head = lane // kv_heads % layers, lane % kv_heads % HEADS
    dims = tl.arange(0, DIM)[None, :]
    base = cache + layer.to(tl.int64) * layer_stride + head * DIM + dims
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        wanted = (target >= BLOCK) & (target < num_slots) & (source != target)
        moves = (wanted & (source >= 0) & (source < num_slots))[:, None]
        old = base + (source // BLOCK * block_stride + source % BLOCK * entry_stride)[:, None]
        new = base + (target // BLOCK * block_stride + target % BLOCK * entry_stride)[:, None]
        keys = tl.load(old, mask=moves)
        values = tl.load(old + value_stride, mask=moves)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        tl.store(new, keys, mask=moves)
        tl.store(new + value_stride, values, mask=moves)
