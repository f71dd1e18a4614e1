"""What Triton's kernels are told of keys or values, however they are held."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.store.entries import Entries
from kvserve.kernels.store.few_bits import FewVectors


class Told(NamedTuple):
    """``form``: 0 for numbers, ``VectorForm.code``, or 64 and the bits for few bits.

    ``stored`` are numbers or levels; ``steps`` and ``lows`` int16, which no device rounds, or
    codes; what there is none of is another one. ``strides`` are those of numbers or levels but the
    last; of few bits of blocks, tiles and heads, with ``width``: bytes of a strip, ``numbers``: as
    many as the fields of a vector's strips have room for, and ``log``: added to a code's own.
    """

    form: int
    stored: Tensor
    steps: Tensor
    lows: Tensor
    strides: tuple[int, ...]
    numbers: int
    width: int = 0
    log: float = 0.0


def told_of(held: Entries) -> Told:
    """Of keys or values [num_blocks, ..., B, Hb, D]."""
    dim = held.shape[-1]
    if isinstance(held, Tensor):
        return Told(0, held, held, held, held.stride()[:-1], dim)
    if isinstance(held, FewVectors):
        bits, width = held.form.bits, held.form.strips(dim)[1]
        block, head, tile, _ = held.tiles.stride()
        codes, log = held.tiles[..., held.codes_at :], math.log2(held.factor) - 8
        numbers = (8 if bits == 3 else 8 // bits) * width
        parts = held.tiles[..., held.at :], codes, codes
        return Told(64 + bits, *parts, (block, tile, head), numbers, width, log)
    step = held.step.view(torch.int16)
    low = step if held.low is None else held.low.view(torch.int16)
    return Told(held.form.code, held.levels, step, low, held.levels.stride()[:-1], dim)
