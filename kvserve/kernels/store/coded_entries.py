"""Entries held as codes: what a slot stores, and which key and value it stands for.

A lane (one KV head of one layer of a row) may hold its first entries as slots, which refer to
vectors of the lane's codebook. A vector is a key as it was cached, after RoPE, or a value. A slot's
key is its vector rotated by the distance between the two tokens' positions, and scaled; for the
vector's own token these are the very same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense

CODE_WORDS = 8
"""16-bit words of a slot; the last two are not used."""


@dataclass(frozen=True, slots=True)
class Slots:
    """What is stored of each entry; all fields have one shape. References and places are int64.

    Stored in ``CODE_WORDS``: both references, both scales (float16), the token's position (below
    65,536, as are references: the engine's ``check_codes`` refuses longer sequences), and its
    distance from the position of its key's vector.
    """

    ref_k: Tensor
    ref_v: Tensor
    scale_k: Tensor
    scale_v: Tensor
    position: Tensor
    distance: Tensor

    def packed(self) -> Tensor:
        """int16 [..., CODE_WORDS]."""
        refs = torch.stack([self.ref_k, self.ref_v], dim=-1).to(torch.int16)
        scales = torch.stack([self.scale_k, self.scale_v], dim=-1).half().view(torch.int16)
        places = torch.stack([self.position, self.distance], dim=-1).to(torch.int16)
        return torch.cat([refs, scales, places, torch.zeros_like(places)], dim=-1)

    @classmethod
    def unpacked(cls, words: Tensor) -> Slots:
        """From int16 [..., CODE_WORDS]."""
        ref_k, ref_v, position = (words[..., at].long() & 0xFFFF for at in (0, 1, 4))
        scale_k, scale_v = (words[..., at].view(torch.float16).float() for at in (2, 3))
        return cls(ref_k, ref_v, scale_k, scale_v, position, words[..., 5].long())


class Codes(NamedTuple):
    """What rows hold as codes in one layer; each block is of one layer and KV head.

    ``slots`` int16 [num_blocks, S, CODE_WORDS] and ``vectors`` [num_blocks, V, D] are two views of
    the cache. The first ``coded [num_rows, R]`` (int64) entries of lane (row, table) are slots, in
    the blocks of ``slot_tables``; they refer to vectors in those of ``vector_tables`` (both int32
    [num_rows, R, .]). ``turns`` float32 [n, D]: the rotation of keys over 0 to n - 1 positions,
    cosines, then sines.
    """

    slots: Tensor
    vectors: Tensor
    coded: Tensor
    slot_tables: Tensor
    vector_tables: Tensor
    turns: Tensor

    def check(self, tables: Tensor, keys: Tensor) -> None:
        """Raises ``ValueError`` if they do not fit tables [num_rows, R, M] and the cache."""
        slots, vectors, coded, slot_tables, vector_tables, turns = self
        num_blocks, block, heads, dim = keys.shape
        lanes, of_codes = tables.shape[:2], "{} of codes".format
        check_dense(of_codes("slots"), slots, (num_blocks, slots.shape[1], CODE_WORDS), torch.int16)
        check_dense(of_codes("vectors"), vectors, (num_blocks, 2 * block, dim), keys.dtype)
        check_dense(of_codes("coded"), coded, lanes, torch.int64)
        for name, table in (("slot_tables", slot_tables), ("vector_tables", vector_tables)):
            check_dense(of_codes(name), table, (*lanes, table.shape[-1]), torch.int32)
        check_dense(of_codes("turns"), turns, (len(turns), dim), torch.float32)
        if heads != 1:
            raise ValueError(
                f"codes are of one KV head a block, and the cache is {list(keys.shape)}"
            )


def turns_of(inv_freq: Tensor, count: int) -> Tensor:
    """``Codes.turns`` for distances below ``count``; inv_freq: float32 [D / 2]."""
    distance = torch.arange(count, device=inv_freq.device)
    angle = distance[:, None].float() * inv_freq
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def rotated(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [..., D] rotated by angles of these cosines and sines [..., D / 2]: float32."""
    left, right = keys.float().chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def read_codes(codes: Codes, lane: Tensor, entry: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, float32 [P, D], of coded entries ``entry [P]`` of lanes ``lane [P]``, which
    are numbered row by row."""
    slots = Slots.unpacked(_take(codes.slots, codes.slot_tables, lane, entry))
    key, value = (
        _take(codes.vectors, codes.vector_tables, lane, ref).float()
        for ref in (slots.ref_k, slots.ref_v)
    )
    cos, sin = codes.turns[slots.distance.abs()].chunk(2, dim=-1)
    key = rotated(key, cos, sin * slots.distance.sign()[..., None])
    return key * slots.scale_k[..., None], value * slots.scale_v[..., None]


def _take(blocks: Tensor, tables: Tensor, lane: Tensor, number: Tensor) -> Tensor:
    """Items ``number [P]`` of lanes ``lane [P]``, from blocks [num_blocks, N, .]."""
    per_block = blocks.shape[1]
    block = tables.flatten(0, 1)[lane, number // per_block].long()
    return blocks[block, number % per_block]
