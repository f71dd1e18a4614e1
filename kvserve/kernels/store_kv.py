"""Write new keys and values (and logged queries) to their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_slots
from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl


_E4M3 = torch.finfo(torch.float8_e4m3fn)


def store_kv(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store one layer's new entries.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D], each block dense; layer: the layer's place in its
    block; slots: int64 [R, T]; key, value: [T, R * Hb, D].
    """
    store = store_kv_triton if kv_cache.is_cuda else store_kv_torch
    store(kv_cache, layer, slots, key, value)


def store_queries(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """Log one layer's queries, as means over groups of neighbouring heads.

    query_log: [num_blocks, Lb, tokens, Hb, D], the cache seen as log blocks (uint8: e4m3 numbers);
    slots: int64 [R, T]; query: [T, R * Hb * group, D].
    """
    store = store_queries_triton if query_log.is_cuda else store_queries_torch
    store(query_log, layer, slots, query)


def store_kv_torch(kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """The reference of ``store_kv``."""
    _, layers, _, block, heads, dim = kv_cache.shape
    if not kv_cache.is_contiguous():  # blocks that have room for more
        for half, x in enumerate((key, value)):
            by_row = x.unflatten(1, (len(slots), -1)).transpose(0, 1)
            kv_cache[:, layer, half][slots // block, slots % block] = by_row
        return
    flat = kv_cache.view(-1, heads * dim)
    rows = (slots + slots // block * (block * (2 * layers - 1)) + 2 * layer * block).view(-1)
    flat.index_copy_(0, rows, _by_row(key, slots, heads * dim))
    flat.index_copy_(0, rows + block, _by_row(value, slots, heads * dim))


def store_queries_torch(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """The reference of ``store_queries``."""
    _, layers, tokens, heads, dim = query_log.shape
    query = _as_logged(query_log, slots, query)
    if not query_log.is_contiguous():  # blocks of bytes, the last of which are unused
        by_row = query.unflatten(1, (len(slots), -1)).transpose(0, 1)
        query_log[:, layer][slots // tokens, slots % tokens] = by_row
        return
    rows = (slots + slots // tokens * (tokens * (layers - 1)) + layer * tokens).view(-1)
    flat = query_log.view(-1, heads * dim)
    flat.index_copy_(0, rows, _by_row(query, slots, heads * dim))


def _by_row(x: Tensor, slots: Tensor, width: int) -> Tensor:
    """[T, R * Hb, D] -> [R * T, Hb * D], the order of ``slots.view(-1)``."""
    return x.unflatten(1, (len(slots), -1)).transpose(0, 1).reshape(-1, width)


def store_kv_triton(
    kv_cache: Tensor, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """One program per token and row. Slots outside of the cache are left alone."""
    _launch(kv_cache[:, layer, 0], slots, key, kv_cache[:, layer, 1], value)


def store_queries_triton(query_log: Tensor, layer: int, slots: Tensor, query: Tensor) -> None:
    """As ``store_kv_triton``."""
    _launch(query_log[:, layer], slots, _as_logged(query_log, slots, query))


def reduce_queries(q: Tensor, heads: int) -> Tensor:
    """q: [T, Hq, D] -> [T, heads, D], means over neighbouring heads; unchanged if heads is Hq."""
    return q.unflatten(1, (heads, -1)).mean(dim=2)


def _as_logged(query_log: Tensor, slots: Tensor, query: Tensor) -> Tensor:
    reduced = reduce_queries(query, len(slots) * query_log.shape[3])
    if query_log.dtype is not torch.uint8:
        return reduced
    return reduced.clamp(-_E4M3.max, _E4M3.max).to(torch.float8_e4m3fn).view(torch.uint8)


def _launch(
    blocks: Tensor,
    slots: Tensor,
    x: Tensor,
    more_blocks: Tensor | None = None,
    more: Tensor | None = None,
) -> None:
    """blocks: [num_blocks, tokens, Hb, D], a strided view; x: [T, R * Hb, D]; ``more`` likewise."""
    num_blocks, block, heads, dim = blocks.shape
    rows, tokens = slots.shape
    check_slots(slots, num_blocks, block)
    for new in (x, x if more is None else more):
        fits = new.shape == (tokens, rows * heads, dim) and new.dtype == blocks.dtype
        if not fits or not new[:1].is_contiguous():
            raise ValueError(
                f"{blocks.dtype} [{tokens}, {rows * heads}, {dim}] with contiguous tokens expected,"
                f" got {new.dtype} {list(new.shape)}, strides {list(new.stride())}"
            )
    _store.launch(
        (tokens, rows),
        blocks,
        blocks if more_blocks is None else more_blocks,
        slots.contiguous(),
        x,
        x if more is None else more,
        x.stride(0),
        x.stride(0) if more is None else more.stride(0),
        num_blocks * block,
        *blocks.stride()[:2],
        BLOCK=block,
        WIDTH=heads * dim,
        SPAN=1 << (heads * dim - 1).bit_length(),
        BOTH=more is not None,
        num_warps=4 if heads * dim >= 1024 else 1,
    )


@Kernel
def _store(
    blocks,
    more_blocks,
    slots,
    x,
    more,
    x_stride,
    more_stride,
    num_slots,
    block_stride,
    entry_stride,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    BOTH: tl.constexpr,
):
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row * tl.num_programs(0) + token)
    numbers = tl.arange(0, SPAN)
    mask = (numbers < WIDTH) & (slot >= 0) & (slot < num_slots)
    place = slot // BLOCK * block_stride + slot % BLOCK * entry_stride + numbers
    new = row * WIDTH + numbers
    tl.store(blocks + place, tl.load(x + token * x_stride + new, mask=mask), mask=mask)
    if BOTH:
        values = tl.load(more + token * more_stride + new, mask=mask)
        tl.store(more_blocks + place, values, mask=mask)
