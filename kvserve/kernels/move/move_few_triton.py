"""Entries in few bits (``few_bits.py``) on a GPU: read as numbers, and moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kvserve.kernels.checks import check_head_dim
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.few_bits import FewBlocks
from kvserve.kernels.store.few_bits_triton import (
    TOKENS_AT_ONCE,
    form_of,
    inside,
    levels_at,
    scales_on,
)
from kvserve.kernels.store.turning_triton import EXACT, turned

if TYPE_CHECKING:
    import triton.language as tl


def gather_few_triton(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """One launch for layers of equal bits. Entries of slots outside of the cache are 0."""
    out = torch.empty(*slots.shape, blocks.dim, dtype=dtype, device=slots.device)
    check_head_dim(out)
    slots, length = slots.contiguous(), slots.shape[2]
    for some in _alike(blocks, tuple(layers)):
        held = blocks.layer(some.layer)[int(values)]
        _gather_few.launch(
            (len(some.places) * slots.shape[1], -(-length // TOKENS_AT_ONCE)),
            *(
                out,
                blocks.pool,
                some.means,
                some.places,
                some.starts,
                scales_on(slots.device),
                slots,
            ),
            *(length, slots.shape[1], len(held.tiles) * blocks.block_size),
            *(*held.tiles.stride()[:3], held.at, held.codes_at, held.factor, blocks.dim**-0.5),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            **form_of(held),
            TOKENS=TOKENS_AT_ONCE,
            **EXACT,
        )
    return out


def move_few_triton(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """One program per lane and run. Slots outside of the cache are left alone."""
    if src.shape != dst.shape or src.shape[-1] % runs:
        raise ValueError(f"slots {list(src.shape)} to {list(dst.shape)} are not {runs} equal runs")
    src, dst, length = src.contiguous(), dst.contiguous(), src.shape[-1] // runs
    for some in _alike(blocks, tuple(layers)):
        keys, values = blocks.layer(some.layer)
        (strips, width), (more, v_width) = (x.form.strips(blocks.dim) for x in (keys, values))
        _move_few.launch(
            (len(some.places) * src.shape[1], runs),
            *(blocks.pool, some.places, some.starts, src, dst, length, src.shape[1]),
            *(len(keys.tiles) * blocks.block_size, *keys.tiles.stride()[:3]),
            BLOCK=blocks.block_size,
            HEADS=blocks.heads,
            TILE=32,
            KEY_BYTES=strips * width,
            KEY_WIDTH=width,
            VALUE_BYTES=more * v_width,
            VALUE_WIDTH=v_width,
            SPAN=1 << (max(strips * width, more * v_width) - 1).bit_length(),
            num_warps=4,
        )


class _Alike(NamedTuple):
    """Layers of one form among some: ``places`` int64 [n] in these, ``starts`` int64 [n] where each
    is in a block, and ``means`` of all of these, float32 [L', Hkv, D]. ``layer`` is one of them."""

    layer: int
    places: Tensor
    starts: Tensor
    means: Tensor


_ALIKE = WeakKeyDictionary[FewBlocks, dict[tuple[int, ...], list[_Alike]]]()


def _alike(blocks: FewBlocks, layers: tuple[int, ...]) -> list[_Alike]:
    """``layers`` by their forms; tensors go to the device once."""
    known = _ALIKE.setdefault(blocks, {})
    if layers not in known:
        means = torch.stack([blocks.layers[layer].shaping.mean for layer in layers])
        forms: dict[Any, list[int]] = {}
        for place, layer in enumerate(layers):
            key, value, _, shaping = blocks.layers[layer]
            forms.setdefault((key, value, shaping.feedback is None), []).append(place)
        known[layers] = [
            _Alike(
                layers[places[0]],
                torch.tensor(places, device=means.device),
                torch.tensor([blocks.layers[layers[at]].at for at in places], device=means.device),
                means,
            )
            for places in forms.values()
        ]
    return known[layers]


@Kernel
def _gather_few(
    out,
    pool,
    means,
    places,
    starts,
    scales,
    slots,
    length,
    kv_heads,
    num_slots,
    block_stride,
    head_stride,
    tile_stride,
    strips_at,
    codes_at,
    factor,
    shrink,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    head, dims = tl.program_id(0) % kv_heads, tl.arange(0, DIM)[None, :]
    lane = tl.load(places + tl.program_id(0) // kv_heads) * kv_heads + head
    base = tl.load(starts + tl.program_id(0) // kv_heads) + head % HEADS * head_stride
    place = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wanted, row = place < length, lane * length + place
    slot = tl.load(slots + row, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    slot = tl.where(known, slot, 0)
    entry = (slot % 16).to(tl.int32)
    tile = pool + base + slot // BLOCK * block_stride + slot % BLOCK // 16 * tile_stride
    level = levels_at(tile + strips_at, entry, DIM, BITS, WIDTH, KEYS).to(tl.float32)
    step = tl.load(scales + tl.load(tile + codes_at + entry).to(tl.int32)) * factor
    numbers = turned((level - ((1 << (BITS - 1)) - 0.5)) * step[:, None], shrink, DIM)
    if KEYS:
        numbers += tl.load(means + lane * DIM + dims)
    numbers = tl.where(known[:, None], numbers, 0.0).to(out.dtype.element_ty)
    tl.store(out + (row * DIM)[:, None] + dims, numbers, mask=wanted[:, None])


@Helper
def bytes_at(
    entry, BYTES: tl.constexpr, WIDTH: tl.constexpr, SPAN: tl.constexpr, KEYS: tl.constexpr
):
    """Where in a tile the bytes of entries ``[N]`` are, [N, SPAN], from its first strip on."""
    byte = tl.arange(0, SPAN)[None, :]
    return inside(byte // WIDTH, byte % WIDTH, entry[:, None], WIDTH, KEYS)


@Kernel
def _move_few(
    pool,
    places,
    starts,
    src,
    dst,
    length,
    kv_heads,
    num_slots,
    block_stride,
    head_stride,
    tile_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BYTES: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    head, byte = tl.program_id(0) % kv_heads, tl.arange(0, SPAN)[None, :]
    lane = tl.load(places + tl.program_id(0) // kv_heads) * kv_heads + head
    base = pool + tl.load(starts + tl.program_id(0) // kv_heads) + head % HEADS * head_stride
    first = (lane * tl.num_programs(1) + tl.program_id(1)) * length
    VALUES_AT: tl.constexpr = 16 * KEY_BYTES
    CODES_AT: tl.constexpr = 16 * (KEY_BYTES + VALUE_BYTES)
    for start in range(0, length, TILE):
        place = start + tl.arange(0, TILE)
        source = tl.load(src + first + place, mask=place < length, other=0)
        target = tl.load(dst + first + place, mask=place < length, other=0)
        moved = (target >= BLOCK) & (target < num_slots) & (source != target)
        moved = moved & (source >= 0) & (source < num_slots)
        keys, values = moved[:, None] & (byte < KEY_BYTES), moved[:, None] & (byte < VALUE_BYTES)
        was, to = (source % 16).to(tl.int32), (target % 16).to(tl.int32)
        old = base + source // BLOCK * block_stride + source % BLOCK // 16 * tile_stride
        new = base + target // BLOCK * block_stride + target % BLOCK // 16 * tile_stride
        at = bytes_at(was, KEY_BYTES, KEY_WIDTH, SPAN, True)
        key = tl.load(old[:, None] + at, mask=keys)
        at = bytes_at(was, VALUE_BYTES, VALUE_WIDTH, SPAN, False)
        value = tl.load(old[:, None] + VALUES_AT + at, mask=values)
        k_code = tl.load(old + CODES_AT + was, mask=moved)
        v_code = tl.load(old + CODES_AT + 16 + was, mask=moved)
        # A tile may overwrite its own sources (never a later tile's): all of it is read first.
        tl.debug_barrier()
        at = bytes_at(to, KEY_BYTES, KEY_WIDTH, SPAN, True)
        tl.store(new[:, None] + at, key, mask=keys)
        at = bytes_at(to, VALUE_BYTES, VALUE_WIDTH, SPAN, False)
        tl.store(new[:, None] + VALUES_AT + at, value, mask=values)
        tl.store(new + CODES_AT + to, k_code, mask=moved)
        tl.store(new + CODES_AT + 16 + to, v_code, mask=moved)
