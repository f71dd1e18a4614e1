"""Entries in 1 to 4 bits (``few_levels.py``) in blocks: written, read as numbers, and moved.

A *tile* is 16 entries of one head: strips of keys, strips of values, 16 codes of keys, 16 of
values. A strip of keys has four bytes of each entry side by side, entry after entry, then the next
four. One of values has a byte of four entries side by side, byte after byte, then the next four
entries. So both are read as they meet queries and weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvserve.entry_format import TILE, VectorForm
from kvserve.kernels.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.store.entries import FewLayer, Told
from kvserve.kernels.store.few_levels import (
    PLAIN,
    SHAPED,
    VALUES,
    numbers_of,
    packed,
    quantize,
    unpacked,
)
from kvserve.kernels.store.turning import turn_torch

_STORE, _GATHER, _MOVE = (
    Compiled(name, "few_bits") for name in ("store_few", "gather_few", "move_few")
)


@dataclass(frozen=True, slots=True)
class FewVectors:
    """Keys or values of one layer: ``tiles`` uint8 [num_blocks, Hb, B / 16, bytes], both of them.

    ``at`` and ``codes_at``: where its levels and codes are in a tile. ``factor``: a.
    """

    form: VectorForm
    dim: int
    tiles: Tensor
    at: int
    codes_at: int
    factor: float
    of_keys: bool

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor of numbers that this stands for: [num_blocks, B, Hb, D]."""
        *lead, heads, tiles, _ = self.tiles.shape
        return torch.Size([*lead, tiles * TILE, heads, self.dim])

    def __getitem__(self, at: Any) -> FewVectors:
        """Of some blocks."""
        return replace(self, tiles=self.tiles[at])

    def select(self, dim: int, blocks: Tensor) -> FewVectors:
        """``index_select`` of blocks."""
        return replace(self, tiles=self.tiles.index_select(dim, blocks))

    @property
    def told(self) -> Told:
        """Of its form."""
        bits, width = self.form.bits, self.form.strips(self.dim)[1]
        block, head, tile, _ = self.tiles.stride()
        codes, log = self.tiles[..., self.codes_at :], math.log2(self.factor) - 8
        numbers = (8 if bits == 3 else 8 // bits) * width
        parts = self.tiles[..., self.at :], codes, codes
        return Told(64 + bits, *parts, (block, tile, head), numbers, width, log)

    def passed(self, values: FewVectors) -> tuple[object, ...]:
        """As of ``AnyLevels``."""
        bits, factors = (self.form.bits, values.form.bits), (self.factor, values.factor)
        few = *bits, None, None, *factors
        return self.tiles, self.tiles, *[None] * 3, self.tiles.stride(1), *few

    @property
    def places(self) -> Tensor:
        """Where in a tile the bytes of its 16 entries are: int64 [16, bytes of a vector + 1], the
        code behind the levels."""
        return _places(self.form, self.dim, self.at, self.codes_at, self.of_keys)

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, turned: [..., B, Hb, D]."""
        held = self.tiles[..., self.places.to(self.tiles.device)]  # [..., Hb, B / 16, 16, bytes]
        return self.numbers(held).flatten(-3, -2).transpose(-3, -2).to(dtype)

    def numbers(self, held: Tensor) -> Tensor:
        """What the bytes of vectors stand for: uint8 [..., bytes + 1] -> float32 [..., D]."""
        bits, levels = self.form.bits, unpacked(held[..., :-1], self.form.bits, self.dim)
        return numbers_of(levels, held[..., -1], bits, self.factor)


@cache
def _places(form: VectorForm, dim: int, at: int, codes_at: int, of_keys: bool) -> Tensor:
    strips, width = form.strips(dim)
    entry, byte = torch.arange(TILE)[:, None], torch.arange(width)
    if of_keys:
        inside = byte // 4 * (4 * TILE) + entry * 4 + byte % 4
    else:
        inside = entry // 4 * (4 * width) + byte * 4 + entry % 4
    levels = [at + strip * TILE * width + inside for strip in range(strips)]
    return torch.cat([*levels, codes_at + entry], dim=1)


@dataclass(frozen=True, slots=True)
class FewHeads:
    """Keys or values of one layer whose KV heads differ in bits: each head's own ``FewVectors``,
    and where all its parts are. ``pool`` uint8 [num_blocks, bytes]; ``lanes`` int64 [Hkv, 3]: a
    head's tiles in a block, bits of its keys and of its values; ``factors`` float32 [Hkv, 2]."""

    heads: tuple[FewVectors, ...]
    pool: Tensor
    lanes: Tensor
    factors: Tensor

    @property
    def form(self) -> VectorForm:
        """One of its heads': all are of few bits."""
        return self.heads[0].form

    @property
    def shape(self) -> torch.Size:
        """[num_blocks, B, Hkv, D]."""
        *lead, _, dim = self.heads[0].shape
        return torch.Size([*lead, len(self.heads), dim])

    def __getitem__(self, at: Any) -> FewHeads:
        """Of some blocks, to be widened."""
        return replace(self, heads=tuple(head[at] for head in self.heads))

    def passed(self, values: FewHeads) -> tuple[object, ...]:
        """As of ``AnyLevels``."""
        return self.pool, self.pool, *[None] * 3, *[0] * 3, self.lanes, self.factors, 0, 0

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers, turned: [..., B, Hkv, D]."""
        return torch.cat([head.widened(dtype) for head in self.heads], dim=-2)


class FewBlocks:
    """A pool of bytes, ``pool`` uint8 [num_blocks, bytes], read as the keys and values of its
    layers, which differ in bits. Each has ``heads`` lanes of tiles in a block."""

    def __init__(
        self, pool: Tensor, layers: tuple[FewLayer, ...], heads: int, block_size: int, dim: int
    ) -> None:
        self.pool, self.heads, self.block_size, self.dim = pool, heads, block_size, dim
        self.layers = layers
        self._views = [self._view(layer) for layer in layers]
        self._told: dict[tuple[int, ...], Any] = {}

    @property
    def slot_outside(self) -> str:
        """What is said of a slot that no block has."""
        return slot_outside(len(self.pool), self.block_size)

    def told(self, layers: Sequence[int]) -> Any:
        """What the C++ file is told of these layers, once: its ``FewLayer`` of each."""
        if (known := tuple(layers)) not in self._told:
            each = [self._fields(layer) for layer in known]
            self._told[known] = _STORE.records("FewLayer", each)
        return self._told[known]

    def _fields(self, layer: int) -> tuple[object, ...]:
        keys, values = self._views[layer]
        sizes = self.pool.stride(0), len(self.pool), self.block_size, self.heads, self.dim
        bits, factors = (keys.form.bits, values.form.bits), (keys.factor, values.factor)
        return keys.tiles, *sizes, *bits, *factors, *self.layers[layer].shaping

    def bytes_at(self, held: FewVectors, slots: Tensor, first: int = 0) -> Tensor:
        """Bytes of the vectors in slots [n, S] of n heads, from number ``first`` on: uint8 [n, S,
        bytes + 1]."""
        return held.tiles[self.entries_at(held, slots, first)]

    def entries_at(self, held: FewVectors, slots: Tensor, first: int = 0) -> tuple[Tensor, ...]:
        """Where they are in ``held.tiles``."""
        block, place = slots // self.block_size, slots % self.block_size
        head = torch.arange(first, first + len(slots), device=slots.device) % self.heads
        at = held.places.to(slots.device)[place % TILE]
        return block[..., None], head[:, None, None], (place // TILE)[..., None], at

    def layer(self, layer: int) -> tuple[FewVectors, FewVectors]:
        """Its keys and values: [num_blocks, B, Hb, D] twice."""
        return self._views[layer]

    def beside(self, first: int, count: int) -> tuple[FewHeads, FewHeads]:
        """Keys and values of ``count`` layers of one head each, as heads of one layer."""
        some, views = self.layers[first : first + count], self._views[first : first + count]
        lanes = torch.tensor([[x.at, x.key.bits, x.value.bits] for x in some])
        factors = torch.tensor([[keys.factor, values.factor] for keys, values in views])
        keys, values = (FewHeads(x, self.pool, lanes, factors) for x in zip(*views, strict=True))
        return keys, values

    def _view(self, layer: FewLayer) -> tuple[FewVectors, FewVectors]:
        forms, pool, dim = (layer.key, layer.value), self.pool, self.dim
        levels = [TILE * form.levels(dim) for form in forms]
        size = sum(levels) + 2 * TILE
        shape = len(pool), self.heads, self.block_size // TILE, size
        strides = pool.stride(0), shape[2] * size, size, 1
        tiles = pool.as_strided(shape, strides, pool.storage_offset() + layer.at)
        shaped = layer.shaping.feedback is not None
        keys = (SHAPED if shaped else PLAIN)[forms[0].bits]
        values, codes = VALUES[forms[1].bits], sum(levels)
        return (
            FewVectors(forms[0], dim, tiles, 0, codes, keys, True),
            FewVectors(forms[1], dim, tiles, levels[0], codes + TILE, values, False),
        )


def store_few_torch(
    blocks: FewBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Turn, round and store one layer's new entries, as ``store_kv_torch``. slots: int64 [R, T];
    key, value: [T, R * Hb, D]."""
    shaping = blocks.layers[layer].shaping
    turned = turn_torch(key, shaping.mean, torch.float32), turn_torch(value, dtype=torch.float32)
    lanes = slots.repeat_interleave(blocks.heads, dim=0)
    for held, x in zip(blocks.layer(layer), turned, strict=True):
        levels, codes = quantize(x, held.form.bits, held.factor, shaping if held.of_keys else None)
        new = torch.cat([packed(levels, held.form.bits), codes[..., None]], dim=-1)
        held.tiles[blocks.entries_at(held, lanes)] = new.transpose(0, 1)


def store_layers_torch(
    blocks: FewBlocks, layers: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """The same of several layers, in the same slots: key, value [L', T, R * Hb, D]."""
    for layer, k, v in zip(layers, key, value, strict=True):
        store_few_torch(blocks, layer, slots, k, v)


def store_few_cpu(blocks: FewBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """For float32 or bfloat16. ``ValueError`` for shapes that do not fit each other;
    ``IndexError``, with nothing written, for a slot that is not there."""
    store_layers_cpu(blocks, (layer,), slots, key[None], value[None])


def store_layers_cpu(
    blocks: FewBlocks, layers: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Errors as of ``store_few_cpu``."""
    tables, tokens = slots.shape
    shape = len(layers), tokens, tables * blocks.heads, blocks.dim
    dtypes = torch.float32, torch.bfloat16
    for new in (key, value):
        dense = new.stride()[2:] == (blocks.dim, 1) and new.dtype is key.dtype
        if new.shape != shape or not dense or new.dtype not in dtypes:
            raise ValueError(
                f"store_few: new entries of {new.dtype} {list(new.shape)} for slots "
                f"{list(slots.shape)}: {list(shape)} of {dtypes} is needed, tokens dense"
            )
    apart = key.stride(0), value.stride(0), key.stride(1), value.stride(1)
    told = blocks.told(layers), key, value, as_int64(slots), len(layers), *apart
    _STORE(*told, tokens, tables, key.dtype is torch.bfloat16, refused=blocks.slot_outside)


def gather_few_torch(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """Keys (or values) of ``layers [L']``, as they came but for their rounding: [L', Hkv, S, D].
    slots: int64 [L', Hkv, S]."""
    found = []
    for layer, own in zip(layers, slots, strict=True):
        held, mean = blocks.layer(layer)[int(values)], blocks.layers[layer].shaping.mean
        numbers = turn_torch(held.numbers(blocks.bytes_at(held, own)).transpose(0, 1))
        found.append((numbers if values else numbers + mean).transpose(0, 1))
    return torch.stack(found).to(dtype)


def move_few_torch(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """Copy entries, bit for bit, as ``move_kv_torch``: int64 slots [L, Hkv, S]."""
    for layer, source, target in zip(layers, src, dst, strict=True):
        for held in blocks.layer(layer):
            moved = blocks.bytes_at(held, source)
            held.tiles[blocks.entries_at(held, target)] = moved


def gather_few_cpu(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """To float32 or bfloat16. ``IndexError`` as of the store."""
    slots = as_int64(slots)
    out = torch.empty(*slots.shape, blocks.dim, dtype=dtype)
    _check_layers(layers, slots)
    places = out, slots, *slots.shape, values, dtype is torch.bfloat16
    _GATHER(blocks.told(layers), *places, refused=blocks.slot_outside)
    return out


def move_few_cpu(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """Entry after entry. ``IndexError`` as of the store."""
    if src.shape != dst.shape:
        raise ValueError(f"move_few: slots {list(src.shape)} to {list(dst.shape)}")
    _check_layers(layers, src)
    places = as_int64(src), as_int64(dst), *src.shape
    _MOVE(blocks.told(layers), *places, refused=blocks.slot_outside)


def _check_layers(layers: list[int], slots: Tensor) -> None:
    if len(layers) != len(slots):
        raise ValueError(f"few bits: slots {list(slots.shape)} of {len(layers)} layers")
