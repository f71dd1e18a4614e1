"""How many bytes a key and a value take in a block, and where they stand in it. No torch here.

A vector (the key or the value of one token and KV head) is held as it was computed, or as levels:
small whole numbers (``int8``, ``int4``) or e4m3 numbers (``fp8``), beside a scale of its own, and
for ``int4`` its lowest number, both bfloat16. A *lane* is one KV head of one layer; its part of a
block is one run of bytes: all keys' levels, all values' levels, then their scales and lowest
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

_ALIGNED = 16  # bytes: so that a lane's part can be read as any type


@dataclass(frozen=True, slots=True)
class VectorForm:
    """``bits`` for each number of a vector, and ``extras``: bfloat16 numbers beside them."""

    name: str
    bits: int
    extras: int = 0

    def levels(self, dim: int) -> int:
        """Bytes of a vector of ``dim`` numbers, without the ``extras``."""
        return dim * self.bits // 8

    def size(self, dim: int) -> int:
        """All bytes of a vector of ``dim`` numbers."""
        return self.levels(dim) + 2 * self.extras


INT8 = VectorForm("int8", 8, 1)
INT4 = VectorForm("int4", 4, 2)
FP8 = VectorForm("fp8", 8, 1)


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """The forms of a key and of a value; ``multiple`` has to divide their dimension."""

    name: str
    key: VectorForm
    value: VectorForm
    multiple: int = 1

    @property
    def quantized(self) -> bool:
        """Whether levels are held, not the numbers themselves."""
        return self.key.extras > 0

    def entry_bytes(self, dim: int) -> int:
        """Bytes of one token's key and value, of one layer and head."""
        return self.key.size(dim) + self.value.size(dim)

    def lane_bytes(self, block_size: int, dim: int) -> int:
        """Bytes of a block for one layer and KV head."""
        size = block_size * self.entry_bytes(dim)
        return -(-size // _ALIGNED) * _ALIGNED if self.quantized else size

    def refusal(self, dim: int) -> str | None:
        """Why this format cannot hold heads of this size; ``None`` if it can."""
        if dim % self.multiple:
            return f"head_dim {dim} is not a multiple of {self.multiple}"
        return None


FORMATS = {
    "int8": EntryFormat("int8", INT8, INT8, 8),
    "k8v4": EntryFormat("k8v4", INT8, INT4, 16),
    "fp8": EntryFormat("fp8", FP8, FP8, 8),
}
"""What ``--kv-cache-dtype`` names besides ``auto``."""


def entry_format(name: str, itemsize: int) -> EntryFormat:
    """The format called ``name``; ``auto``: numbers of ``itemsize`` bytes, as they are computed."""
    if name == "auto":
        raw = VectorForm("raw", 8 * itemsize)
        return EntryFormat("auto", raw, raw)
    return FORMATS[name]
