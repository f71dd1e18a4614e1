"""How many bytes a key and a value take in a block. No torch here.

A vector (the key or the value of one token and KV head) is held as it was computed, or as *levels*:
whole numbers of few bits, or e4m3 numbers. Of 8 bits, and values of 4 beside such keys, it has a
*step* and, where levels count from its lowest number, that number, its *low*: both bfloat16. A
*lane* is one KV head of one layer; its part of a block is one run of bytes: all keys' levels, all
values' levels, then the keys' steps, the values' steps and their lows. Keys and values that both
have *few* bits are turned before they are rounded, and have a code of one byte
(``kernels/store/few_levels.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNED = 16
"""Bytes, so that a lane's part of a block can be read as any type."""
TILE = 16
"""Entries in few bits that are stored together."""


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How a vector is held, as numbers that every kernel is made from.

    ``bits`` for each channel. ``low``: a number is low + step * level; without it, step * level.
    ``e4m3``: levels are such numbers. ``few``: see the module.
    """

    bits: int
    low: bool = False
    e4m3: bool = False
    few: bool = False

    @property
    def quantized(self) -> bool:
        """Whether levels are held, not the numbers themselves."""
        return self.bits <= 8

    @property
    def most(self) -> int:
        """The largest level."""
        if self.e4m3:
            return 448
        return 2**self.bits - 1 if self.low else 2 ** (self.bits - 1) - 1

    @property
    def code(self) -> int:
        """The form as one number, the constant of kernels, which read few bits of any number."""
        return 64 if self.few else self.bits + 16 * self.low + 32 * self.e4m3

    def strips(self, dim: int) -> tuple[int, int]:
        """Of few bits: how many strips a vector has, and the bytes of each."""
        fields = 8 if self.bits == 3 else 8 // self.bits
        return (3 if self.bits == 3 else 1), -(-dim // (4 * fields)) * 4

    def levels(self, dim: int) -> int:
        """Bytes of a vector's levels."""
        return math.prod(self.strips(dim)) if self.few else dim * self.bits // 8

    def size(self, dim: int) -> int:
        """All bytes of a vector."""
        if self.few:
            return self.levels(dim) + 1
        return self.levels(dim) + 2 * (1 + self.low) * self.quantized


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The forms of a key and of a value.

    ``newest``, if not 0: those from a row's last multiple of so many tokens on, and the row's
    first, are held as they were computed, too, and read so. ``average``, if not 0: keys' and
    values' bits differ by layer, so many on average; not those of ``key`` and ``value``.
    """

    name: str
    key: VectorForm
    value: VectorForm
    newest: int = 0
    average: float = 0.0

    @property
    def quantized(self) -> bool:
        """Whether levels are held, not the numbers themselves."""
        return self.key.quantized

    @property
    def few(self) -> bool:
        """Whether both are of few bits."""
        return self.key.few

    def level_bytes(self, dim: int, layers: int) -> int:
        """Bytes of levels of one token's keys and values, of ``layers`` that share a block and one
        head: what layers of different bits share among them."""
        if not self.average:
            return layers * (self.key.levels(dim) + self.value.levels(dim))
        return int(2 * layers * mean_levels(self.average, dim, bits_of_layers(dim))) // 4 * 4

    def entry_bytes(self, dim: int, layers: int = 1) -> int:
        """Bytes of one token's keys and values, of ``layers`` that share a block and one head."""
        if self.few:
            return self.level_bytes(dim, layers) + 2 * layers
        return layers * (self.key.size(dim) + self.value.size(dim))

    def mean_bytes(self, dim: int, layers: int) -> float:
        """Bytes of one token's key and value in one layer and head, of ``layers`` that share a
        block."""
        return self.entry_bytes(dim, layers) / layers

    def block_bytes(self, block_size: int, dim: int, layers: int, heads: int) -> int:
        """Bytes of a block of so many layers and KV heads."""
        size = heads * block_size * self.entry_bytes(dim, layers)
        if self.quantized and not self.few:
            lane = -(-block_size * self.entry_bytes(dim) // ALIGNED) * ALIGNED
            size = heads * layers * lane
        return size

    def lane_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of a block for one layer and KV head, if all layers have as many."""
        return self.block_bytes(block_size, dim, 1, 1)

    def newest_tokens(
        self, block_size: int, dim: int, itemsize: int, layers: int = 1, heads: int = 1
    ) -> int:
        """Tokens that a block of so many layers and KV heads holds as computed, ``itemsize`` bytes
        a number."""
        size = self.block_bytes(block_size, dim, layers, heads)
        return size // (layers * heads * 2 * dim * itemsize)

    def refusal(self, dim: int) -> str | None:
        """Why this format cannot hold heads of this size; ``None`` if it can."""
        least = min(self.key.bits, self.value.bits)
        multiple = 1 if least > 8 else 8 * (1 + (least < 8))  # kernels read bytes by eights
        if dim % multiple:
            return f"head_dim {dim} is not a multiple of {multiple}"
        if self.few and not self.average and least not in bits_of_layers(dim):
            return f"head_dim {dim} takes as many bytes in {least} bits as in 4 (k4v4)"
        return None


def few(bits: int) -> VectorForm:
    """Vectors in few bits."""
    return VectorForm(bits, few=True)


def mean_levels(average: float, dim: int, there: tuple[int, ...]) -> float:
    """Bytes of a vector's levels where vectors have ``average`` of the bits ``there``."""
    average = max(average, there[0])
    low = max(bits for bits in there if bits <= average)
    high = min(bits for bits in there if bits >= average)
    less, more = few(low).levels(dim), few(high).levels(dim)
    return less + ((average - low) / (high - low) if high > low else 0.0) * (more - less)


def bits_of_layers(dim: int, least: int = 2) -> tuple[int, ...]:
    """Bits that a layer's keys or values may have: each takes more bytes than fewer bits do. With
    fewer than 2, single layers lose too much; ``least`` 1 is for those of single KV heads."""
    return tuple(
        bits
        for bits in range(least, BITS[-1] + 1)
        if all(few(bits).levels(dim) < few(more).levels(dim) for more in range(bits + 1, 5))
    )


BITS = (2, 3, 4)
"""Of keys or values in few bits."""
NEWEST = 128
"""Entries in few bits are read as computed from a row's last multiple of so many tokens on."""
_INT8, _E4M3, _INT4 = VectorForm(8), VectorForm(8, e4m3=True), VectorForm(4, low=True)
FORMATS = {
    form.name: form
    for form in (
        EntryFormat("int8", _INT8, _INT8),
        EntryFormat("k8v4", _INT8, _INT4),
        *(EntryFormat(f"k{bits}v{bits}", few(bits), few(bits), NEWEST) for bits in (4, 3, 2)),
        EntryFormat("3bit", few(3), few(3), NEWEST, 3.0),
        EntryFormat("2.75bit", few(3), few(2), NEWEST, 2.75),
        EntryFormat("2.5bit", few(3), few(2), NEWEST, 2.5),
        EntryFormat("2bit", few(2), few(2), NEWEST, 2.0),
        EntryFormat("fp8", _E4M3, _E4M3),
    )
}
"""What ``--kv-cache-dtype`` names besides ``auto``."""


def entry_format(name: str, itemsize: int) -> EntryFormat:
    """The format called ``name``; ``auto``: numbers of ``itemsize`` bytes, as they are computed."""
    raw = VectorForm(8 * itemsize)
    return FORMATS[name] if name in FORMATS else EntryFormat("auto", raw, raw)


def int4_bytes(dim: int) -> int:
    """Bytes of one logged vector; its codes take an even number of them."""
    return -(-dim // 4) * 2 + 4
