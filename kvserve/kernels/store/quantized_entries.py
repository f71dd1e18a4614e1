"""Keys and values held as levels: how a vector is rounded, once, and which numbers it stands for.

A vector is rounded for itself: number = low + step * level, over its range; without a low, number =
step * level, where the step is the largest magnitude over the largest level. Step and low are
bfloat16, rounded outwards before anything is divided by them, so no number is cut off. All of it is
float32 arithmetic; levels are rounded to nearest, ties to even. A number and what it is held as
differ by at most half a step: of int8 by 0.51 / 127 of the largest magnitude, of 4 bits by 0.52 /
15 of the range (widened to hold its rounded ends), of fp8 by 1/16 of the number itself or, below
2 ** -6, by 2 ** -10 steps.

Levels of 4 bits share bytes: of D channels byte j holds number j, and above it number j + D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve.entry_format import EntryFormat, VectorForm
from kvserve.kernels.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.store.entries import Told
from kvserve.kernels.store.slot_mapping import by_row

_STORE_LEVELS = Compiled("store_levels", "storage")


@dataclass(frozen=True, slots=True)
class QuantizedVectors:
    """Keys or values: ``levels`` uint8 [..., C], C bytes a vector; ``step`` and, if the form has
    one, ``low``: bfloat16 [...]. Indices are of the leading dimensions."""

    form: VectorForm
    levels: Tensor
    step: Tensor
    low: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor of numbers that this stands for."""
        *lead, width = self.levels.shape
        return torch.Size([*lead, width * 8 // self.form.bits])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored: a copy of each is a copy of the vectors, bit for bit."""
        return (self.levels, self.step) if self.low is None else (self.levels, self.step, self.low)

    def __getitem__(self, at: Any) -> QuantizedVectors:
        low = None if self.low is None else self.low[at]
        return replace(self, levels=self.levels[at], step=self.step[at], low=low)

    def select(self, dim: int, blocks: Tensor) -> QuantizedVectors:
        """``index_select`` of every part."""
        levels, step, *low = (part.index_select(dim, blocks) for part in self.parts)
        return QuantizedVectors(self.form, levels, step, *low)

    @property
    def told(self) -> Told:
        """Of its form."""
        step = self.step.view(torch.int16)
        low = step if self.low is None else self.low.view(torch.int16)
        strides, dim = self.levels.stride()[:-1], self.shape[-1]
        return Told(self.form.code, self.levels, step, low, strides, dim)

    def passed(self, values: QuantizedVectors) -> tuple[object, ...]:
        """As of ``AnyLevels``; of few bits there is nothing."""
        steps, few = (self.step, values.step, values.low), (0, 0, None, None, 0, 0)
        return self.levels, values.levels, *steps, self.levels.stride(2), *few

    def __setitem__(self, at: Any, new: QuantizedVectors) -> None:
        for part, values in zip(self.parts, new.parts, strict=True):
            part[at] = values

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers: [..., D]."""
        form = self.form
        if form.e4m3:
            levels = self.levels.view(torch.float8_e4m3fn).float()
        elif form.low:
            levels = torch.cat([self.levels & 15, self.levels >> 4], dim=-1).float()
        else:
            levels = self.levels.view(torch.int8).float()
        numbers = levels * self.step[..., None].float()
        if self.low is not None:
            numbers = numbers + self.low[..., None].float()
        return numbers.to(dtype)


class LevelKeys(NamedTuple):
    """Keys whose levels have a sign and a byte each: ``levels int8 [..., D]``, ``steps float32
    [...]``."""

    levels: Tensor
    steps: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the numbers: [..., D]."""
        return self.levels.shape

    def float(self) -> Tensor:
        """The numbers: float32 [..., D]."""
        return self.levels.float() * self.steps[..., None]


def quantize(x: Tensor, form: VectorForm) -> QuantizedVectors:
    """Round vectors [..., D]. Equal numbers of a vector give equal levels."""
    x = x.float()
    # A tensor: torch multiplies by the inverse of a number on CUDA, which rounds otherwise.
    most = x.new_full((), form.most)
    if form.low:
        low = -_above(-x.amin(dim=-1))
        step = _above((x.amax(dim=-1) - low.float()) / most)
        levels = (x - low[..., None].float()) / _divisor(step)
        first, second = levels.round().clamp(x.new_zeros(()), most).to(torch.uint8).chunk(2, dim=-1)
        return QuantizedVectors(form, first | second << 4, step, low)
    step = _above(x.abs().amax(dim=-1) / most)
    levels = x / _divisor(step)
    if form.e4m3:
        stored = levels.clamp(-most, most).to(torch.float8_e4m3fn)
    else:
        stored = levels.round().clamp(-most, most).to(torch.int8)
    return QuantizedVectors(form, stored.view(torch.uint8), step)


def _above(x: Tensor) -> Tensor:
    """The least bfloat16 numbers that are not below float32 ``x``."""
    bits = x.contiguous().view(torch.int32)
    up = torch.where(bits < 0, bits, bits + 0xFFFF)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)


def _divisor(step: Tensor) -> Tensor:
    step = step[..., None].float()
    return torch.where(step > 0, step, 1.0)


class QuantizedBlocks:
    """A pool of bytes, read as the keys and values of all layers and heads of its blocks.

    ``keys`` and ``values``: [num_blocks, Lb, B, Hb, D], as numbers; views of ``pool`` uint8
    [num_blocks, Lb, Hb * lane_bytes].
    """

    def __init__(self, pool: Tensor, form: EntryFormat, block_size: int, dim: int) -> None:
        self.pool = pool
        self.lane_bytes = form.block_bytes(block_size, dim, 1, 1)
        lead = *pool.shape[:2], block_size, pool.shape[2] // self.lane_bytes
        block, layer, head = pool.stride(0), pool.stride(1), self.lane_bytes
        numbers = pool.view(torch.bfloat16)
        at, levels = 0, []
        for vector in (form.key, form.value):
            width = vector.levels(dim)
            strides = block, layer, width, head, 1
            levels.append(pool.as_strided((*lead, width), strides, pool.storage_offset() + at))
            at += block_size * width
        held = []
        for vector, own in zip((form.key, form.value), levels, strict=True):
            parts = []
            for _ in range(1 + vector.low):
                offset = (pool.storage_offset() + at) // 2
                apart = block // 2, layer // 2, 1, head // 2
                parts.append(numbers.as_strided(lead, apart, offset))
                at += 2 * block_size
            held.append(QuantizedVectors(vector, own, *parts))
        self.keys, self.values = held

    @cached_property
    def fields(self) -> tuple[object, ...]:
        """``Blocks`` of the C++ file: addresses inside of the pool, which stays where it is."""
        held = []
        for x in (self.keys, self.values):
            parts = (x.levels, x.step, x.low)
            at = (None if part is None else part.data_ptr() for part in parts)
            held.append((*at, x.form.bits, x.form.e4m3))
        return (*held, *self.pool.stride()[:2], self.lane_bytes, *self.keys.shape)

    @property
    def slot_outside(self) -> str:
        """What is said of a slot that no block has."""
        return slot_outside(self.keys.shape[0], self.keys.shape[2])

    def layer(self, place: int) -> tuple[QuantizedVectors, QuantizedVectors]:
        """Keys and values of one layer of each block: [num_blocks, B, Hb, D] twice."""
        return self.keys[:, place], self.values[:, place]


def store_levels_torch(
    blocks: QuantizedBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Round and store one layer's new entries, as ``store_kv_torch``. slots: int64 [R, T]; key,
    value: [T, R * Hb, D]."""
    for held, x in zip(blocks.layer(layer), (key, value), strict=True):
        block = held.shape[1]
        held[slots // block, slots % block] = quantize(by_row(x, slots), held.form)


def store_levels_cpu(
    blocks: QuantizedBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """For float32 or bfloat16. ``ValueError`` for shapes that do not fit each other;
    ``IndexError``, with nothing written, for a slot that is not there."""
    tables, tokens = slots.shape
    *_, heads, dim = blocks.keys.shape
    shape, dtypes = (tokens, tables * heads, dim), (torch.float32, torch.bfloat16)
    for new in (key, value):
        if new.shape != shape or new.stride()[1:] != (dim, 1) or new.dtype not in dtypes:
            raise ValueError(
                f"store_levels: new entries of {new.dtype} {list(new.shape)} for slots "
                f"{list(slots.shape)}: {list(shape)} of {dtypes} is needed, tokens dense"
            )
    _STORE_LEVELS(
        *(blocks.fields, key, value, as_int64(slots)),
        *(key.stride(0), value.stride(0), layer, tokens, tables, key.dtype is torch.bfloat16),
        refused=blocks.slot_outside,
    )
