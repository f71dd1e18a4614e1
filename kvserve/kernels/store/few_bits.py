"""Keys and values in 1 to 4 bits: how a vector is written, once, and which numbers it stands for.

Vectors are held *turned*: x = H (k - mean) or H v, where H is a Hadamard matrix (``turning.py``)
and the mean one of the model's keys. No softmax sees a mean that all keys of a head share, and a
query that is turned as well, H q, reads turned keys as they are; what is read of values is turned
back once for each query.

Of a turned vector of D channels, in float32, no product fused with a sum:

1. m is the sum of x_i x_i in ascending order, over D. The code c is 16 log2 of the root of m,
   rounded to nearest, plus 128, from 0 to 255: a byte, which stands for s = 2^((c - 128) / 16).
2. A step is a s, where a is a constant of the form. Levels count h = 2^(bits - 1) below 0; a level
   stands for (level - h + 1/2) step.
3. A level is floor(x_i / step) + h, from 0 to 2 h - 1.
4. Keys of a model with a table are *shaped* so that their error points where queries do not look:
   GPTQ's rule (arXiv 2210.17323, algorithm 1) on the entry itself. Channels are visited in the
   order o of the table, from the last to the first: t_i = x_o(i), less F_ji e_j for each j > i, the
   last j first. The level is that of t_i, and e_i is what it stands for less x_o(i). F is unit
   lower triangular.

Division by a step is a product with its reciprocal. What is not finite becomes something finite.

A *strip* has S bytes of an entry, with levels of *fields* of S channels each: field f is channels
f S to (f + 1) S - 1, from the lowest bits up. Of 4, 2 and 1 bits there is one strip of 2, 4 and 8
fields. Of 3 bits there are three: strip i has fields 2 i and 2 i + 1 in bits 0 to 5; bits 6 and 7
of the first two are the lower bits of fields 6 and 7, bits 7 and 6 of the third their highest. S is
a multiple of 4, so there may be channels behind D, which are nothing.

A *tile* is 16 entries of one head: strips of keys, strips of values, 16 codes of keys, 16 of
values. A strip of keys has four bytes of each entry side by side, entry after entry, then the next
four. One of values has a byte of four entries side by side, byte after byte, then the next four
entries. So both are read as they meet queries and weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve.entry_format import TILE, VectorForm, few
from kvserve.kernels.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.store.slot_mapping import by_row
from kvserve.kernels.store.turning import turn_torch

_STORE = Compiled("store_few", "few_bits")
PLAIN = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Steps of least error, in roots of the mean square of a Gaussian (Max, 1960, table II)."""
SHAPED = {1: 2.1, 2: 1.15, 3: 0.70, 4: 0.38}
"""Wider ones for errors that are fed back, which widen what is rounded."""
VALUES = {1: 2.15, 2: 1.15, 3: 0.63, 4: 0.36}
"""Wider ones for values: a step of least error makes numbers smaller, and so what attention adds up
of many of them."""
_THRESHOLDS = tuple(2 ** ((2 * k - 1) / 16) for k in range(1, 9))


class Shaping(NamedTuple):
    """Of one layer's keys, by KV head: what they are less, and where errors may point.

    ``mean`` float32 [Hkv, D], before turning. ``feedback`` float32 [Hkv, D, D], F, and ``order``
    int64 [Hkv, D], o; both ``None``: rounded plainly.
    """

    mean: Tensor
    feedback: Tensor | None = None
    order: Tensor | None = None

    def heads(self, first: int, count: int) -> Shaping:
        """Of some heads alone."""
        mean, *beside = (x if x is None else x[first : first + count] for x in self)
        assert mean is not None
        return Shaping(mean, *beside)


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
        levels = unpacked(held[..., :-1], self.form.bits, self.dim).float()
        half = 2 ** (self.form.bits - 1) - 0.5
        return (levels - half) * self.steps(held[..., -1])[..., None]

    def steps(self, codes: Tensor) -> Tensor:
        """uint8 [...] -> float32 [...]."""
        return scales().to(codes.device)[codes.long()] * self.factor


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


@cache
def scales() -> Tensor:
    """What codes stand for: float32 [256]."""
    return 2 ** ((torch.arange(256, dtype=torch.float64) - 128) / 16).float()


def codes_of(x: Tensor) -> Tensor:
    """uint8 codes of turned vectors, float32 [..., D] -> [...]."""
    total = torch.zeros_like(x[..., 0])
    for channel in x.unbind(-1):
        total = total + channel * channel
    mantissa, exponent = torch.frexp(total / x.shape[-1])  # from 1/2 to 1
    above = sum((mantissa * 2 >= torch.tensor(t, device=x.device)).int() for t in _THRESHOLDS)
    code = 8 * (exponent - 1) + above + 128
    code = torch.where(total > 0, code, 0).clamp(0, 255)
    return torch.where(total.isfinite(), code, 255).to(torch.uint8)


def levels_of(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """Levels of x [...], uint8, by steps."""
    half = 2 ** (bits - 1)
    levels = torch.floor(x * (1.0 / step)) + half
    return levels.nan_to_num(0.0).clamp(0, 2 * half - 1).to(torch.uint8)


def quantize(
    x: Tensor, bits: int, factor: float, shaping: Shaping | None = None
) -> tuple[Tensor, Tensor]:
    """Levels uint8 [T, H, D] and codes uint8 [T, H] of turned vectors, float32 [T, H, D]."""
    codes = codes_of(x)
    step = scales().to(x.device)[codes.long()] * factor
    if shaping is None or shaping.feedback is None or shaping.order is None:
        return levels_of(x, step[..., None], bits), codes
    half, dim = 2 ** (bits - 1) - 0.5, x.shape[-1]
    order, feedback = shaping.order.expand_as(x), shaping.feedback
    wanted = x.gather(-1, order)
    left, levels = wanted.clone(), torch.empty_like(wanted, dtype=torch.uint8)
    for i in reversed(range(dim)):
        levels[..., i] = levels_of(left[..., i], step, bits)
        error = (levels[..., i].float() - half) * step - wanted[..., i]
        left[..., :i] -= feedback[:, i, :i] * error[..., None]
    return torch.empty_like(levels).scatter_(-1, order, levels), codes


def packed(levels: Tensor, bits: int) -> Tensor:
    """Bytes of a vector's strips: uint8 [..., D] -> [..., strips * S]."""
    strips, width = few(bits).strips(levels.shape[-1])
    fields = 8 if bits == 3 else 8 // bits
    padded = torch.nn.functional.pad(levels, (0, fields * width - levels.shape[-1]))
    field = padded.unflatten(-1, (fields, width)).unbind(-2)
    if strips == 1:
        return torch.stack([x << (bits * f) for f, x in enumerate(field)]).sum(0, dtype=torch.uint8)
    low = [field[2 * i] | field[2 * i + 1] << 3 for i in range(3)]
    low[0], low[1] = (x | (field[6 + i] & 3) << 6 for i, x in enumerate(low[:2]))
    low[2] = low[2] | (field[6] >> 2) << 7 | (field[7] >> 2) << 6
    return torch.cat(low, dim=-1)


def unpacked(held: Tensor, bits: int, dim: int) -> Tensor:
    """Levels of strips: uint8 [..., strips * S] -> [..., D]."""
    strips, width = few(bits).strips(dim)
    strip = held.unflatten(-1, (strips, width)).unbind(-2)
    if strips == 1:
        fields = [strip[0] >> (bits * f) & (1 << bits) - 1 for f in range(8 // bits)]
    else:
        fields = [x >> shift & 7 for x in strip for shift in (0, 3)]
        fields += [strip[0] >> 6 | strip[2] >> 5 & 4, strip[1] >> 6 | strip[2] >> 4 & 4]
    return torch.cat(fields, dim=-1)[..., :dim]


class FewLayer(NamedTuple):
    """One layer of a pool: what its entries are, and where they are in a block."""

    key: VectorForm
    value: VectorForm
    at: int
    shaping: Shaping


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

    def layer(self, layer: int) -> tuple[FewVectors, FewVectors]:
        """Its keys and values: [num_blocks, B, Hb, D] twice."""
        return self._views[layer]

    def beside(self, first: int, count: int) -> tuple[FewHeads, FewHeads]:
        """Keys and values of ``count`` layers of one head each, as heads of one layer."""
        some, views = self.layers[first : first + count], self._views[first : first + count]
        lanes = torch.tensor([[x.at, x.key.bits, x.value.bits] for x in some])
        factors = torch.tensor([[keys.factor, values.factor] for keys, values in views])
        keys, values = zip(*views, strict=True)
        return (
            FewHeads(keys, self.pool, lanes, factors),
            FewHeads(values, self.pool, lanes, factors),
        )

    def _view(self, layer: FewLayer) -> tuple[FewVectors, FewVectors]:
        forms, pool, dim = (layer.key, layer.value), self.pool, self.dim
        levels = [TILE * form.levels(dim) for form in forms]
        size = sum(levels) + 2 * TILE
        shape = len(pool), self.heads, self.block_size // TILE, size
        strides = pool.stride(0), shape[2] * size, size, 1
        tiles = pool.as_strided(shape, strides, pool.storage_offset() + layer.at)
        shaped = layer.shaping.feedback is not None
        keys = (SHAPED if shaped else PLAIN)[forms[0].bits]
        at = 0, levels[0]
        codes = sum(levels), sum(levels) + TILE
        return (
            FewVectors(forms[0], dim, tiles, at[0], codes[0], keys, True),
            FewVectors(forms[1], dim, tiles, at[1], codes[1], VALUES[forms[1].bits], False),
        )


def store_few_torch(
    blocks: FewBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Turn, round and store one layer's new entries, as ``store_kv_torch``. slots: int64 [R, T];
    key, value: [T, R * Hb, D]."""
    shaping = blocks.layers[layer].shaping
    turned = turn_torch(key, shaping.mean, torch.float32), turn_torch(value, dtype=torch.float32)
    block, place = slots // blocks.block_size, slots % blocks.block_size
    for held, x in zip(blocks.layer(layer), turned, strict=True):
        levels, codes = quantize(x, held.form.bits, held.factor, shaping if held.of_keys else None)
        new = torch.cat([packed(levels, held.form.bits), codes[..., None]], dim=-1)
        at = held.places.to(slots.device)[place % TILE]  # [R, T, bytes]
        head = torch.arange(blocks.heads, device=slots.device)[:, None]
        lead = block[..., None, None], head, (place // TILE)[..., None, None]
        held.tiles[(*lead, at[:, :, None])] = by_row(new, slots)


def bytes_at(blocks: FewBlocks, held: FewVectors, slots: Tensor, first: int = 0) -> Tensor:
    """Bytes of the vectors in slots [n, S] of n heads, from number ``first`` on: uint8 [n, S, bytes
    + 1]."""
    return held.tiles[entries_at(blocks, held, slots, first)]


def entries_at(
    blocks: FewBlocks, held: FewVectors, slots: Tensor, first: int = 0
) -> tuple[Tensor, ...]:
    """Where they are in ``held.tiles``."""
    block, place = slots // blocks.block_size, slots % blocks.block_size
    head = torch.arange(first, first + len(slots), device=slots.device) % blocks.heads
    at = held.places.to(slots.device)[place % TILE]
    return block[..., None], head[:, None, None], (place // TILE)[..., None], at


def store_layers_torch(
    blocks: FewBlocks, layers: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """The same of several layers, in the same slots: key, value [L', T, R * Hb, D]."""
    for layer, k, v in zip(layers, key, value, strict=True):
        store_few_torch(blocks, layer, slots, k, v)


def store_few_cpu(blocks: FewBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """For float32 or bfloat16. ``ValueError`` for shapes that do not fit each other;
    ``IndexError``, with nothing written, for a slot that is not there."""
    _store(blocks, (layer,), slots, key, value, (0, 0))


def store_layers_cpu(
    blocks: FewBlocks, layers: Sequence[int], slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Errors as of ``store_few_cpu``."""
    if not len(layers) == len(key) == len(value):
        raise ValueError(f"store_few: {len(layers)} layers for {len(key)} of new entries")
    _store(blocks, layers, slots, key[0], value[0], (key.stride(0), value.stride(0)))


def _store(
    blocks: FewBlocks,
    layers: Sequence[int],
    slots: Tensor,
    key: Tensor,
    value: Tensor,
    apart: tuple[int, int],
) -> None:
    """``key`` and ``value`` are the first layer's; how far ``apart`` are those of the others?"""
    tables, tokens = slots.shape
    shape, dtypes = (tokens, tables * blocks.heads, blocks.dim), (torch.float32, torch.bfloat16)
    for new in (key, value):
        dense = new.stride()[1:] == (blocks.dim, 1) and new.dtype is key.dtype
        if new.shape != shape or not dense or new.dtype not in dtypes:
            raise ValueError(
                f"store_few: new entries of {new.dtype} {list(new.shape)} for slots "
                f"{list(slots.shape)}: {list(shape)} of {dtypes} is needed, tokens dense"
            )
    _STORE(
        *(blocks.told(layers), key, value, as_int64(slots), len(layers), *apart),
        *(key.stride(0), value.stride(0), tokens, tables, key.dtype is torch.bfloat16),
        refused=blocks.slot_outside,
    )
