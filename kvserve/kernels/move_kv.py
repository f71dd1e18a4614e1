"""Read scattered entries of all layers and heads at once, and move kept ones to the front."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim, runs_triton
from kvserve.kernels.cpu.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.dispatch import Kernel

if TYPE_CHECKING:
    import triton.language as tl

_GATHER_KV, _MOVE_KV = Compiled("gather_kv", "move_kv"), Compiled("move_kv")


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


def gather_keys_cpu(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """``IndexError``, with nothing read, for a slot that is not there."""
    return _gather_cpu(kv_cache, slots, layer_ids, values=False)


def gather_values_cpu(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """As ``gather_keys_cpu``."""
    return _gather_cpu(kv_cache, slots, layer_ids, values=True)


def _gather_cpu(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None, *, values: bool
) -> Tensor:
    layer_ids = torch.arange(slots.shape[0]) if layer_ids is None else as_int64(layer_ids)
    slots, sizes = as_int64(slots), _sizes_of(kv_cache)
    out = kv_cache.new_empty(*slots.shape, kv_cache.shape[-1])
    places = kv_cache, slots, None, layer_ids, out, *slots.shape
    _GATHER_KV(*places, *sizes, values, refused=slot_outside(sizes[0], sizes[2]))
    return out


def compact_kv_cpu(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Entry after entry. ``IndexError``, with nothing written, for a slot that is not there."""
    if src.shape != dst.shape:
        raise ValueError(f"move_kv: slots {list(src.shape)} to {list(dst.shape)}")
    sizes = _sizes_of(kv_cache)
    places = kv_cache, as_int64(src), as_int64(dst), None, None, *src.shape
    _MOVE_KV(*places, *sizes, False, refused=slot_outside(sizes[0], sizes[2]))


def _sizes_of(kv_cache: Tensor) -> tuple[int, ...]:
    """Blocks, layers, entries and heads of a block, and bytes of a vector."""
    num_blocks, layers, _, size, heads, dim = kv_cache.shape
    if not kv_cache.is_contiguous():
        raise ValueError(f"move_kv: blocks of a cache {list(kv_cache.shape)} have to be dense")
    return num_blocks, layers, size, heads, dim * kv_cache.itemsize


def gather_keys_triton(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Entries of slots outside of the cache are 0."""
    return _launch_gather(kv_cache[:, :, 0], slots, layer_ids)


def gather_queries_triton(
    query_log: Tensor, slots: Tensor, layer_ids: Tensor | None = None
) -> Tensor:
    """As ``gather_keys_triton``."""
    return _launch_gather(query_log, slots, layer_ids)


def _launch_gather(blocks: Tensor, slots: Tensor, layer_ids: Tensor | None) -> Tensor:
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
COMPILED = MoveKernels(gather_keys_cpu, gather_values_cpu, compact_kv_cpu)


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
