"""Read scattered entries of all layers and heads at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim, runs_triton
from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl


def entry_rows(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Rows of ``kv_cache.view(-1, D)`` that hold keys; their values lie ``B * Hb`` rows behind.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; slots: int64 [L', Hkv, S] of the layers
    ``layer_ids [L']`` (default: all of them). Returns the slots' shape.
    """
    _, layers, _, block, heads, _ = kv_cache.shape
    layer, head = _lane_places(slots, layer_ids, layers, heads)
    row = slots // block * (layers * 2 * block) + layer * (2 * block) + slots % block
    return row * heads + head


def gather_keys(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """slots: int64 [L', Hkv, S] of layers ``layer_ids`` -> keys [L', Hkv, S, D]."""
    gather = gather_keys_triton if runs_triton(kv_cache) else gather_keys_torch
    return gather(kv_cache, slots, layer_ids)


def gather_values(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """As ``gather_keys``, of values."""
    block, heads, dim = kv_cache.shape[3:]
    rows = (entry_rows(kv_cache, slots, layer_ids) + block * heads).view(-1)
    return kv_cache.view(-1, dim).index_select(0, rows).view(*slots.shape, dim)


def gather_queries(query_log: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Queries of layers ``layer_ids [L']`` (default: all): [L', Hlog, S, D].

    query_log: [num_blocks, Lb, tokens, Hb, D]; slots: int64 [L', Hlog, S], of the log.
    """
    gather = gather_queries_triton if runs_triton(query_log) else gather_queries_torch
    return gather(query_log, slots, layer_ids)


def gather_keys_torch(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """The reference of ``gather_keys``."""
    dim = kv_cache.shape[-1]
    rows = entry_rows(kv_cache, slots, layer_ids).view(-1)
    return kv_cache.view(-1, dim).index_select(0, rows).view(*slots.shape, dim)


def gather_queries_torch(
    query_log: Tensor, slots: Tensor, layer_ids: Tensor | None = None
) -> Tensor:
    """The reference of ``gather_queries``."""
    _, layers, tokens, heads, dim = query_log.shape
    layer, head = _lane_places(slots, layer_ids, layers, heads)
    if not query_log.is_contiguous():  # blocks of bytes, the last of which are unused
        return query_log[slots // tokens, layer, slots % tokens, head]
    row = (slots // tokens * layers + layer) * tokens + slots % tokens
    rows = (row * heads + head).view(-1)
    return query_log.view(-1, dim).index_select(0, rows).view(*slots.shape, dim)


def _lane_places(
    slots: Tensor, layer_ids: Tensor | None, layers: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Each lane's layer and head inside its block, shaped to broadcast with [L', H, S]."""
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    layer = layer_ids % layers
    head = torch.arange(slots.shape[1], device=slots.device) % heads
    return layer[:, None, None], head[:, None]


def gather_keys_triton(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Entries of slots outside of the cache are 0."""
    return _launch(kv_cache[:, :, 0], slots, layer_ids)


def gather_queries_triton(
    query_log: Tensor, slots: Tensor, layer_ids: Tensor | None = None
) -> Tensor:
    """As ``gather_keys_triton``."""
    return _launch(query_log, slots, layer_ids)


def _launch(blocks: Tensor, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
    """blocks: [num_blocks, Lb, tokens, Hb, D], a strided view -> [L', H, S, D]."""
    check_head_dim(blocks)
    num_blocks, layers, block, heads, dim = blocks.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    out = blocks.new_empty(*slots.shape, dim)
    tile = max(16, 4096 // dim)
    _gather.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        out,
        blocks,
        slots.contiguous(),
        layer_ids,
        slots.shape[2],
        slots.shape[1],
        layers,
        num_blocks * block,
        *blocks.stride()[:3],
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=tile,
        num_warps=4,
    )
    return out


@Kernel
def _gather(
    out,
    blocks,
    slots,
    layer_ids,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    entry_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0)
    layer = tl.load(layer_ids + lane // kv_heads) % layers
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = place < length
    first = lane.to(tl.int64) * length
    slot = tl.load(slots + first + place, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    dims = tl.arange(0, DIM)[None, :]
    base = blocks + layer.to(tl.int64) * layer_stride + lane % kv_heads % HEADS * DIM + dims
    old = base + (slot // BLOCK * block_stride + slot % BLOCK * entry_stride)[:, None]
    entries = tl.load(old, mask=known[:, None], other=0)
    tl.store(out + (first + place)[:, None] * DIM + dims, entries, mask=wanted[:, None])
