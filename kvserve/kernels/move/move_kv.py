"""Read scattered entries of all layers and heads at once, and move kept ones to the front."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.cpu.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.held_arguments import told_of
from kvserve.kernels.store.quantized_entries import QuantizedVectors
from kvserve.kernels.store.quantized_entries_triton import bfloat16_as_float
from kvserve.kernels.store.slot_mapping import places_of, vectors_at

if TYPE_CHECKING:
    import triton.language as tl

Vectors = Tensor | QuantizedVectors
"""Numbers, or levels with steps."""
_GATHER_KV, _MOVE_KV = Compiled("gather_kv", "storage"), Compiled("move_kv", "storage")


def gather_kv_torch(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """Keys (or values) in slots int64 [L', Hkv, S] of layers ``layer_ids [L']`` (default: all):
    [L', Hkv, S, D]; the reference. kv_cache: [num_blocks, Lb, 2, B, Hb, D]."""
    return gather_torch(kv_cache[:, :, int(values)], slots, layer_ids)


def gather_torch(held: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """The same of [num_blocks, Lb, tokens, Hb, D], as queries are logged; the reference."""
    return vectors_at(held, places_of(held.shape, slots, layer_ids))


def move_kv_torch(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries ``src`` to ``dst``, keys and values, in place; the reference: all sources are
    read before any destination is written.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; src, dst: int64 slots [L, Hkv, S], which are ``runs``
    runs (events) of equal length. They may overlap as entries do that move to the front in order:
    no destination is the source of a later entry of its run, or of any entry of another run. What
    goes to block 0 is not used.
    """
    move_torch(kv_cache[:, :, 0], kv_cache[:, :, 1], src, dst)


def move_torch(keys: Vectors, values: Vectors, src: Tensor, dst: Tensor) -> None:
    """Of numbers or levels [num_blocks, Lb, tokens, Hb, D], bit for bit."""
    source, target = (places_of(keys.shape, slots) for slots in (src, dst))
    for held in (keys, values):
        if isinstance(held, Tensor):
            held[target] = vectors_at(held, source)
        else:
            held[target] = held[source]


def gather_kv_cpu(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """``IndexError``, with nothing read, for a slot that is not there."""
    layer_ids = torch.arange(slots.shape[0]) if layer_ids is None else as_int64(layer_ids)
    slots, sizes = as_int64(slots), _sizes_of(kv_cache)
    out = kv_cache.new_empty(*slots.shape, kv_cache.shape[-1])
    places = kv_cache, slots, None, layer_ids, out, *slots.shape
    _GATHER_KV(*places, *sizes, values, refused=slot_outside(sizes[0], sizes[2]))
    return out


def move_kv_cpu(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
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


def gather_kv_triton(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """Those of slots outside of the cache are 0."""
    return gather_triton(kv_cache[:, :, int(values)], slots, layer_ids)


def gather_triton(
    held: Vectors,
    slots: Tensor,
    layer_ids: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Numbers or levels [num_blocks, Lb, tokens, Hb, D], a strided view -> [L', H, S, D]. Those of
    slots outside of the cache are 0."""
    dtype = dtype or (held.dtype if isinstance(held, Tensor) else torch.float32)
    num_blocks, layers, block, heads, dim = held.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    out = torch.empty(*slots.shape, dim, dtype=dtype, device=slots.device)
    check_head_dim(held if isinstance(held, Tensor) else out)
    told = told_of(held)
    tile = max(16, 4096 // dim)
    _gather.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        *(out, told.stored, told.steps, told.lows, slots.contiguous(), layer_ids),
        *(slots.shape[2], slots.shape[1], layers, num_blocks * block, *told.strides),
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=tile,
        FORM=told.form,
        num_warps=4,
    )
    return out


def move_kv_triton(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    check_head_dim(kv_cache)
    move_triton(kv_cache[:, :, 0], kv_cache[:, :, 1], src, dst, runs)


def move_triton(keys: Vectors, values: Vectors, src: Tensor, dst: Tensor, runs: int) -> None:
    """Of numbers or levels [num_blocks, Lb, tokens, Hb, D], strided views."""
    num_blocks, layers, block, heads, dim = keys.shape
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    k, v = told_of(keys), told_of(values)
    _compact.launch(
        (src.shape[0] * src.shape[1], runs),
        *(k.stored, k.steps, v.stored, v.steps, v.lows, src.contiguous(), dst.contiguous()),
        *(src.shape[-1] // runs, src.shape[1], layers, num_blocks * block, *k.strides),
        BLOCK=block,
        HEADS=heads,
        DIM=dim,
        TILE=max(16, 4096 // dim),
        KEY=k.form,
        VALUE=v.form,
        num_warps=4,
    )


@Kernel
def _gather(
    out,
    stored,
    steps,
    lows,
    slots,
    layer_ids,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    entry_stride,
    head_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    FORM: tl.constexpr,
):
    lane = tl.program_id(0)
    layer = tl.load(layer_ids + lane // kv_heads) % layers
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = place < length
    first = lane.to(tl.int64) * length
    slot = tl.load(slots + first + place, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    dims = tl.arange(0, DIM)[None, :]
    base = layer.to(tl.int64) * layer_stride + lane % kv_heads % HEADS * head_stride
    if FORM == 0:
        entry = base + slot // BLOCK * block_stride + slot % BLOCK * entry_stride
        numbers = tl.load(stored + entry[:, None] + dims, mask=known[:, None], other=0)
    else:
        slot = tl.where(known, slot, 0)
        base = slot // BLOCK * block_stride + base
        entry = slot % BLOCK
        at = base // 2 + entry
        BITS: tl.constexpr = FORM % 16
        WIDTH: tl.constexpr = DIM * BITS // 8
        held = tl.load(stored + (base + entry * WIDTH)[:, None] + dims % WIDTH)
        if FORM >= 32:
            numbers = held.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORM >= 16:
            held = (held >> (dims // WIDTH * BITS).to(tl.uint8)) & ((1 << BITS) - 1)
            numbers = held.to(tl.float32)
        else:
            numbers = held.to(tl.int8, bitcast=True).to(tl.float32)
        numbers *= bfloat16_as_float(tl.load(steps + at))[:, None]
        if FORM % 32 >= 16:
            numbers += bfloat16_as_float(tl.load(lows + at))[:, None]
        numbers = tl.where(known[:, None], numbers, 0.0).to(out.dtype.element_ty)
    tl.store(out + (first + place)[:, None] * DIM + dims, numbers, mask=wanted[:, None])


@Helper
def vectors_of(stored, base, entry, entry_stride, DIM: tl.constexpr, FORM: tl.constexpr):
    """Where vectors ``entry [N]`` of the lanes ``base [N]`` on lie: levels side by side, numbers
    ``entry_stride`` apart."""
    WIDTH: tl.constexpr = DIM * (FORM % 16) // 8 if FORM > 0 else DIM
    first = base + entry * (WIDTH if FORM > 0 else entry_stride)
    return stored + first[:, None] + tl.arange(0, WIDTH)[None, :]


@Kernel
def _compact(
    keys,
    key_steps,
    values,
    value_steps,
    value_lows,
    src,
    dst,
    length,
    kv_heads,
    layers,
    num_slots,
    block_stride,
    layer_stride,
    entry_stride,
    head_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
):
    lane = tl.program_id(0)
    first = (lane.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)) * length
    base = (lane // kv_heads % layers).to(tl.int64) * layer_stride
    base += lane % kv_heads % HEADS * head_stride
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        wanted = (target >= BLOCK) & (target < num_slots) & (source != target)
        moved = wanted & (source >= 0) & (source < num_slots)
        every = moved[:, None]
        old = base + source // BLOCK * block_stride, source % BLOCK
        new = base + target // BLOCK * block_stride, target % BLOCK
        key = tl.load(vectors_of(keys, *old, entry_stride, DIM, KEY), mask=every)
        value = tl.load(vectors_of(values, *old, entry_stride, DIM, VALUE), mask=every)
        was, at = old[0] // 2 + old[1], new[0] // 2 + new[1]
        if KEY > 0:
            k_step = tl.load(key_steps + was, mask=moved)
            v_step = tl.load(value_steps + was, mask=moved)
        if VALUE % 32 >= 16:
            v_low = tl.load(value_lows + was, mask=moved)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        tl.store(vectors_of(keys, *new, entry_stride, DIM, KEY), key, mask=every)
        tl.store(vectors_of(values, *new, entry_stride, DIM, VALUE), value, mask=every)
        if KEY > 0:
            tl.store(key_steps + at, k_step, mask=moved)
            tl.store(value_steps + at, v_step, mask=moved)
        if VALUE % 32 >= 16:
            tl.store(value_lows + at, v_low, mask=moved)
