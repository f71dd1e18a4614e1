"""How keys or values may be held, and what kernels are told of each form."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from kvserve.entry_format import VectorForm


class Told(NamedTuple):
    """What Triton's kernels are told of keys or values. ``form``: 0 for numbers,
    ``VectorForm.code``, or 64 and the bits for few bits.

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


class AnyLevels(Protocol):
    """Keys or values [num_blocks, B, Hb, D] as levels; indices are of blocks."""

    @property
    def form(self) -> VectorForm: ...
    @property
    def shape(self) -> torch.Size: ...
    def __getitem__(self, at: Any) -> AnyLevels: ...
    def widened(self, dtype: torch.dtype = ...) -> Tensor: ...
    def passed(self, values: Any) -> tuple[object, ...]:
        """What ``paged_attention.cpp`` is told of keys and ``values`` of one form: the tensors that
        its fields of this name point to, then those from ``key_steps`` to ``value_factor``."""
        ...


class Levels(AnyLevels, Protocol):
    """Those whose form is that of all heads."""

    @property
    def told(self) -> Told: ...
    def select(self, dim: int, blocks: Tensor) -> Levels: ...


Entries: TypeAlias = Tensor | Levels
"""Keys or values [num_blocks, B, Hb, D]: numbers, or levels of them."""
AnyEntries: TypeAlias = Tensor | AnyLevels
"""Or levels whose bits differ by head."""


def told_of(held: Entries) -> Told:
    """Of keys or values [num_blocks, ..., B, Hb, D]."""
    if isinstance(held, Tensor):
        return Told(0, held, held, held, held.stride()[:-1], held.shape[-1])
    return held.told


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


class FewLayer(NamedTuple):
    """One layer of a pool: what its entries are, and where they are in a block."""

    key: VectorForm
    value: VectorForm
    at: int
    shaping: Shaping
