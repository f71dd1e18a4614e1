"""Codes in the cache: index slots and vectors written, read, and rebuilt into scratch blocks.

A slot is eight 16-bit words: the references of key and value, their scales (float16), the token's
position and its distance from the position of its key's vector (int32 each). Vectors are keys as
they were cached, after RoPE, and values; a key turned by that distance is the vector turned back,
scaled and rotated by its own position, and for a vector's own token the very same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.models.spec import RopeSpec
from kvserve.log import ConfigError
from kvserve.scheduler.code_tables import MAX_VECTORS, SLOT_BYTES

_WORDS = SLOT_BYTES // 2


def check_codes(rope: RopeSpec, max_len: int, block_bytes: int) -> int:
    """Slots of an index block; ``ConfigError`` where a model's rows cannot be held as codes."""
    if rope.kind == "dynamic":
        raise ConfigError(
            "--policy.codebook: keys are coded before RoPE, which dynamic NTK makes depend on the "
            "prompt's length; use --policy.codebook false"
        )
    if 2 * max_len > MAX_VECTORS:
        raise ConfigError(
            f"--max-model-len: a codebook refers to at most {MAX_VECTORS // 2} tokens, got "
            f"{max_len}; lower it or use --policy.codebook false"
        )
    if block_bytes % SLOT_BYTES:
        raise ConfigError(
            f"--block-size: a block of {block_bytes} bytes does not hold whole code slots of "
            f"{SLOT_BYTES} bytes; use a multiple of 16"
        )
    return block_bytes // SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Slots:
    """What is stored of each entry; all of one shape. References and places are int64."""

    ref_k: Tensor
    ref_v: Tensor
    scale_k: Tensor
    scale_v: Tensor
    position: Tensor
    distance: Tensor

    def packed(self) -> Tensor:
        """int16 [..., 8]."""
        refs = torch.stack([self.ref_k, self.ref_v], dim=-1).to(torch.int16)
        scales = torch.stack([self.scale_k, self.scale_v], dim=-1).half().view(torch.int16)
        places = torch.stack([self.position, self.distance], dim=-1).int().view(torch.int16)
        return torch.cat([refs, scales, places], dim=-1)

    @classmethod
    def unpacked(cls, words: Tensor) -> Slots:
        """From int16 [..., 8]."""
        refs = words[..., :2].long() & 0xFFFF
        scales = words[..., 2:4].contiguous().view(torch.float16).float()
        places = words[..., 4:].contiguous().view(torch.int32).long()
        return cls(*refs.unbind(-1), *scales.unbind(-1), *places.unbind(-1))


@dataclass(frozen=True, slots=True)
class CodedRows:
    """The n rows of a batch, seen as codes.

    ``totals`` entries are coded in each layer, which the host knows; ``coded [LG, n, R]`` in each
    lane; ``kv_tables``, ``index_tables``, ``vector_tables`` ``[LG, n, R, .]``.
    """

    totals: tuple[int, ...]
    coded: Tensor
    kv_tables: Tensor
    index_tables: Tensor
    vector_tables: Tensor


class CodeStore:
    """Reads and writes codes in the blocks of one cache (one layer and one KV head a block)."""

    def __init__(self, kv: Tensor, inv_freq: Tensor) -> None:
        """kv: [num_blocks, 1, 2, B, 1, D]; inv_freq: float32 [D / 2]."""
        num_blocks, _, _, self.block_size, _, dim = kv.shape
        self.vectors = kv.view(-1, dim)
        self.slots = kv.view(num_blocks, -1).view(torch.int16).view(-1, _WORDS)
        self.slots_per_block = len(self.slots) // num_blocks
        self.vectors_per_block = 2 * self.block_size
        self._inv_freq = inv_freq

    def turn(self, keys: Tensor, distance: Tensor) -> Tensor:
        """Keys [..., D] rotated by ``distance [...]`` positions more: float32."""
        angle = distance[..., None].float() * self._inv_freq
        left, right = keys.float().chunk(2, dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def rebuild(self, layer: int, rows: CodedRows) -> None:
        """Write keys and values of one layer's coded entries to the scratch that tables name."""
        counts, total = rows.coded[layer].reshape(-1), rows.totals[layer]
        lane = torch.arange(len(counts), device=counts.device)
        # With the size known, a GPU need not be waited for.
        lane = lane.repeat_interleave(counts, output_size=total)
        entry = torch.arange(total, device=counts.device) - (counts.cumsum(0) - counts)[lane]
        index, vectors, kv = (
            table[layer].flatten(0, 1)
            for table in (rows.index_tables, rows.vector_tables, rows.kv_tables)
        )
        slots = Slots.unpacked(self.slots[_at(index, lane, entry, self.slots_per_block)])
        key, value = (
            self.vectors[_at(vectors, lane, ref, self.vectors_per_block)].float()
            for ref in (slots.ref_k, slots.ref_v)
        )
        key = self.turn(key, slots.distance) * slots.scale_k[:, None]
        value = value * slots.scale_v[:, None]
        block = kv[lane, entry // self.block_size].long()
        to = block * self.vectors_per_block + entry % self.block_size
        self.vectors[to] = key.to(self.vectors.dtype)
        self.vectors[to + self.block_size] = value.to(self.vectors.dtype)


def _at(tables: Tensor, lane: Tensor, number: Tensor, per_block: int) -> Tensor:
    """Flat places of things ``number [P]`` of lanes ``lane [P]``; tables: [lanes, M]."""
    return tables[lane, number // per_block].long() * per_block + number % per_block
