"""How many bytes a key and a value take in a block, and where they stand in it. No torch here.

A vector (the key or the value of one token and KV head) is held as it was computed, or as *levels*:
whole numbers of few bits, or e4m3 numbers. Each group of its channels has a *step* and, where
levels count from the group's lowest number, that number, its *low*: both bfloat16. A *lane* is one
KV head of one layer; its part of a block is one run of bytes: all keys' levels, all values' levels,
then the keys' steps and lows and the values', group by group.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNED = 16  # bytes: so that a lane's part can be read as any type


@dataclass(frozen=True, slots=True)
class VectorForm:
    """How a vector is held, as numbers that every kernel is made from.

    ``bits`` for each channel. ``group`` channels share a step; 0, or a head that is no multiple of
    it: all channels of a head do. ``low``: a number is low + step * level; without it, step *
    level. ``e4m3``: levels are such numbers.
    """

    bits: int
    group: int = 0
    low: bool = False
    e4m3: bool = False

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
        """``bits``, ``low`` and ``e4m3`` as one number, the constant of kernels."""
        return self.bits + 16 * self.low + 32 * self.e4m3

    def groups(self, dim: int) -> int:
        """How many steps a vector of ``dim`` channels has."""
        return dim // self.group if self.group and dim % self.group == 0 else 1

    def levels(self, dim: int) -> int:
        """Bytes of a vector's levels."""
        return dim * self.bits // 8

    def size(self, dim: int) -> int:
        """All bytes of a vector."""
        steps = 2 * self.groups(dim) * (1 + self.low) if self.quantized else 0
        return self.levels(dim) + steps


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The forms of a key and of a value.

    ``newest``, if not 0: those from a row's last multiple of so many tokens on are held as they
    were computed, too, and read so.
    """

    name: str
    key: VectorForm
    value: VectorForm
    newest: int = 0

    @property
    def quantized(self) -> bool:
        """Whether levels are held, not the numbers themselves."""
        return self.key.quantized

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one token's key and value, of one layer and head."""
        return self.key.size(dim) + self.value.size(dim)

    def lane_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of a block for one layer and KV head."""
        size = block_size * self.entry_bytes(dim)
        return -(-size // _ALIGNED) * _ALIGNED if self.quantized else size

    def newest_tokens(self, block_size: int, dim: int, itemsize: int) -> int:
        """Tokens of a block that holds them as computed, ``itemsize`` bytes a number."""
        return self.lane_bytes(block_size, dim) // (2 * dim * itemsize)

    def refusal(self, dim: int) -> str | None:
        """Why this format cannot hold heads of this size; ``None`` if it can."""
        least = min(self.key.bits, self.value.bits)
        multiple = 1 if least > 8 else 8 * (1 + (least < 8))  # kernels read bytes by eights
        return f"head_dim {dim} is not a multiple of {multiple}" if dim % multiple else None


_INT8, _E4M3 = VectorForm(8), VectorForm(8, e4m3=True)
_INT4 = VectorForm(4, low=True)
_GROUPS_OF_4, _GROUPS_OF_2 = (VectorForm(bits, group=32, low=True) for bits in (4, 2))
_NEWEST = 128
FORMATS = {
    form.name: form
    for form in (
        EntryFormat("int8", _INT8, _INT8),
        EntryFormat("k8v4", _INT8, _INT4),
        EntryFormat("k4v4", _GROUPS_OF_4, _GROUPS_OF_4, newest=_NEWEST),
        EntryFormat("k4v2", _GROUPS_OF_4, _GROUPS_OF_2, newest=_NEWEST),
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
