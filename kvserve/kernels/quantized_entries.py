"""Keys and values held as levels: how a vector is rounded, once, and which numbers it stands for.

``int8`` and ``fp8``: number = level * scale, where the scale is the vector's largest magnitude over
the largest level. ``int4``: number = low + level * scale, over the vector's range. Scale and low
are bfloat16, rounded outwards before anything is divided by them, so no number is cut off, and a
number and what it is held as differ by at most half a step: of int8 by 0.51 / 127 of the vector's
largest magnitude, of int4 by 0.52 / 15 of its range (widened to hold its rounded ends), of fp8 by
1/16 of the number itself or, below 2 ** -6, by 2 ** -10 scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.entry_format import FP8, INT4, INT8, EntryFormat, VectorForm

LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 15.0}
"""The largest level of each form."""


@dataclass(frozen=True, slots=True)
class QuantizedVectors:
    """Keys or values: ``levels`` uint8 [..., C], C bytes a vector; ``scale`` and, of int4, ``low``:
    bfloat16 [...]. Indices are of the leading dimensions."""

    form: VectorForm
    levels: Tensor
    scale: Tensor
    low: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor of numbers that this stands for."""
        *lead, width = self.levels.shape
        return torch.Size([*lead, width * 8 // self.form.bits])

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """All that is stored: a copy of each is a copy of the vectors, bit for bit."""
        return (
            (self.levels, self.scale) if self.low is None else (self.levels, self.scale, self.low)
        )

    def __getitem__(self, at: Any) -> QuantizedVectors:
        low = None if self.low is None else self.low[at]
        return replace(self, levels=self.levels[at], scale=self.scale[at], low=low)

    def select(self, dim: int, blocks: Tensor) -> QuantizedVectors:
        """``index_select`` of every part."""
        levels, scale, *low = (part.index_select(dim, blocks) for part in self.parts)
        return QuantizedVectors(self.form, levels, scale, *low)

    def set(self, at: Any, new: QuantizedVectors) -> None:
        """Write ``new`` over the vectors ``at``."""
        for part, values in zip(self.parts, new.parts, strict=True):
            part[at] = values

    def widened(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers: [..., D]."""
        if self.form is INT8:
            numbers = self.levels.view(torch.int8).float()
        elif self.form is FP8:
            numbers = self.levels.view(torch.float8_e4m3fn).float()
        else:
            numbers = torch.cat([self.levels & 15, self.levels >> 4], dim=-1).float()
        numbers = numbers * self.scale[..., None].float()
        if self.low is not None:
            numbers = numbers + self.low[..., None].float()
        return numbers.to(dtype)


def numbers(x: Tensor | QuantizedVectors) -> Tensor:
    """Vectors as numbers: as they are, or widened to float32."""
    return x if isinstance(x, Tensor) else x.widened()


def quantize(x: Tensor, form: VectorForm) -> QuantizedVectors:
    """Round vectors [..., D], to nearest and ties to even. Equal numbers give equal levels."""
    x = x.float()
    # A tensor: torch multiplies by the inverse of a number on CUDA, which rounds otherwise.
    most = x.new_full((), LARGEST[form.name])
    if form is INT4:
        low = -_above(-x.amin(dim=-1))
        scale = _above((x.amax(dim=-1) - low.float()) / most)
        levels = (x - low[..., None].float()) / _divisor(scale)
        halves = levels.round().clamp(x.new_zeros(()), most).to(torch.uint8).unflatten(-1, (2, -1))
        return QuantizedVectors(form, halves[..., 0, :] | halves[..., 1, :] << 4, scale, low)
    scale = _above(x.abs().amax(dim=-1) / most)
    levels = x / _divisor(scale)
    if form is FP8:
        stored = levels.clamp(-most, most).to(torch.float8_e4m3fn)
    else:
        stored = levels.round().clamp(-most, most).to(torch.int8)
    return QuantizedVectors(form, stored.view(torch.uint8), scale)


def _above(x: Tensor) -> Tensor:
    """The least bfloat16 numbers that are not below float32 ``x``."""
    bits = x.contiguous().view(torch.int32)
    up = torch.where(bits < 0, bits, bits + 0xFFFF)
    return (up >> 16).to(torch.int16).view(torch.bfloat16)


def _divisor(scale: Tensor) -> Tensor:
    scale = scale[..., None].float()
    return torch.where(scale > 0, scale, 1.0)


class QuantizedBlocks:
    """A pool of bytes, read as the keys and values of all layers and heads of its blocks.

    ``keys`` and ``values``: [num_blocks, Lb, B, Hb, D], as numbers; views of ``pool`` uint8
    [num_blocks, Lb, Hb * lane_bytes].
    """

    def __init__(self, pool: Tensor, form: EntryFormat, block_size: int, dim: int) -> None:
        self.pool = pool
        self.lane_bytes = form.lane_bytes(block_size, dim)
        self._lead = *pool.shape[:2], block_size, pool.shape[2] // self.lane_bytes
        self._strides = pool.stride(0), pool.stride(1), self.lane_bytes
        at, parts = 0, []
        for vector in (form.key, form.value):
            parts.append(self._bytes(at, vector.levels(dim)))
            at += block_size * vector.levels(dim)
        held = []
        for vector, levels in zip((form.key, form.value), parts, strict=True):
            extras = [self._numbers(at + i * 2 * block_size) for i in range(vector.extras)]
            at += 2 * block_size * vector.extras
            held.append(QuantizedVectors(vector, levels, *extras))
        self.keys, self.values = held

    def layer(self, place: int) -> tuple[QuantizedVectors, QuantizedVectors]:
        """Keys and values of one layer of each block: [num_blocks, B, Hb, D] twice."""
        return self.keys[:, place], self.values[:, place]

    def _bytes(self, at: int, width: int) -> Tensor:
        """Runs of ``width`` bytes an entry, from byte ``at`` of each lane's part on."""
        block, layer, head = self._strides
        strides = block, layer, width, head, 1
        return self.pool.as_strided((*self._lead, width), strides, self.pool.storage_offset() + at)

    def _numbers(self, at: int) -> Tensor:
        """bfloat16 numbers, one an entry."""
        block, layer, head = (stride // 2 for stride in self._strides)
        pool = self.pool.view(torch.bfloat16)
        return pool.as_strided(self._lead, (block, layer, 1, head), pool.storage_offset() + at // 2)


def store_quantized_torch(
    blocks: QuantizedBlocks, layer: int, slots: Tensor, key: Tensor, value: Tensor
) -> None:
    """Round and store one layer's new entries, as ``store_kv``. slots: int64 [R, T]; key, value:
    [T, R * Hb, D]."""
    for held, x in zip(blocks.layer(layer), (key, value), strict=True):
        block = held.shape[1]
        new = quantize(x.unflatten(1, (len(slots), -1)).transpose(0, 1), held.form)
        held.set((slots // block, slots % block), new)


def gather_quantized_torch(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """Keys (or values) as numbers, as ``gather_keys``: int64 [L', Hkv, S] -> [L', Hkv, S, D]."""
    held = blocks.values if values else blocks.keys
    return held[places_of(held, slots, layer_ids)].widened(dtype)


def move_quantized_torch(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries bit for bit, as ``compact_kv``: all are read before any is written."""
    source, target = (places_of(blocks.keys, slots, None) for slots in (src, dst))
    for held in (blocks.keys, blocks.values):
        held.set(target, held[source])


def places_of(
    held: QuantizedVectors, slots: Tensor, layer_ids: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Indices of [num_blocks, Lb, B, Hb] for slots [L', Hkv, S]."""
    _, layers, block, heads, _ = held.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    head = torch.arange(slots.shape[1], device=slots.device) % heads
    return slots // block, (layer_ids % layers)[:, None, None], slots % block, head[:, None]


class QuantizedKernels(NamedTuple):
    """One implementation of storing, gathering and moving."""

    store: Callable[[QuantizedBlocks, int, Tensor, Tensor, Tensor], None]
    gather: Callable[..., Tensor]
    move: Callable[[QuantizedBlocks, Tensor, Tensor, int], None]


TORCH = QuantizedKernels(store_quantized_torch, gather_quantized_torch, move_quantized_torch)
