"""Random rows of which some entries are codes, as the launchers of attention take them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.store.coded_entries import Codes, Slots, turns_of
from tests.kernels.paged_case import SCALE, Inputs

DISTANCES = 50


@dataclass(frozen=True)
class CodedCase:
    """Chunk p has ``chunks[p]`` tokens, the last of the entries that row p of the tables holds.

    Whatever is not held is nan: blocks of nobody, and what tables name for coded entries.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    rows: Tensor
    starts: Tensor
    last: Tensor
    codes: Codes

    @property
    def inputs(self) -> Inputs:
        most = int(self.starts.diff().max())
        chunks = QuerySegments(self.rows, self.last, int(self.last.max()) + 1, self.starts, most)
        return self.q, self.keys, self.values, self.tables, chunks, SCALE

    def changed(self, **codes: Tensor) -> CodedCase:
        """The same with other codes."""
        return replace(self, codes=self.codes._replace(**codes))


def coded_case(
    held: list[list[int]],
    coded: list[list[int]],
    chunks: list[int],
    *,
    group: int = 2,
    dim: int = 16,
    block: int = 4,
    dtype: torch.dtype = torch.float32,
    num_vectors: int = 37,
) -> CodedCase:
    """``held [P][R]`` entries of each table, of which the first ``coded`` (whole blocks) are codes
    of a codebook of ``num_vectors``."""
    shape = len(held), len(held[0])
    lens, codes_len = torch.tensor(held), torch.tensor(coded)
    per_index = 2 * block * dim * dtype.itemsize // 16
    widths = [
        -(-int(n) // per_block)
        for n, per_block in (
            (lens.max() + 1, block),
            (codes_len.max() + 1, per_index),
            (num_vectors, 2 * block),
        )
    ]
    count = shape[0] * shape[1] * sum(widths)
    names = (torch.randperm(count) + 1).int().split([shape[0] * shape[1] * w for w in widths])
    kv, index, book = (x.view(*shape, -1).clone() for x in names)
    cache = torch.full((count + 1, 2, block, 1, dim), math.nan, dtype=dtype)
    vectors, slots = cache.view(count + 1, 2 * block, dim), cache.view(count + 1, -1)
    slots = slots.view(torch.int16).view(count + 1, per_index, 8)
    for lane in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        p, r = lane
        raw = torch.arange(coded[p][r], held[p][r])
        at = kv[p, r, raw // block].long(), raw % block
        for kind in (0, 1):
            cache[at[0], kind, at[1], 0] = torch.randn(len(raw), dim).to(dtype)
        number = torch.arange(num_vectors)
        at = book[p, r, number // (2 * block)].long(), number % (2 * block)
        vectors[at] = torch.randn(num_vectors, dim).to(dtype)
        number = torch.arange(coded[p][r])
        at = index[p, r, number // per_index].long(), number % per_index
        slots[at] = random_slots(len(number), num_vectors).packed()
        kv[p, r, : coded[p][r] // block] = 0
    owner = torch.arange(shape[0]).repeat_interleave(torch.tensor(chunks))
    behind = torch.cat([torch.arange(n - 1, -1, -1) for n in chunks])
    last = (lens[owner].T - 1 - behind).clamp(min=-1).contiguous()
    starts = torch.tensor([0, *chunks]).cumsum(0)
    q = torch.randn(sum(chunks), shape[1] * group, dim).to(dtype)
    turns = turns_of(1.0 / 100.0 ** (torch.arange(0, dim, 2) / dim), DISTANCES)
    codes = Codes(slots, vectors, codes_len, index, book, turns)
    keys, values = cache.unbind(1)
    return CodedCase(q, keys, values, kv, torch.arange(shape[0]), starts, last, codes)


def random_slots(count: int, num_vectors: int) -> Slots:
    """A third of them as a vector's own token has them."""
    own = torch.rand(count) < 1 / 3
    refs = torch.randint(0, num_vectors, (2, count))
    scales = torch.where(own, 1.0, torch.rand(2, count) + 0.5)
    distance = torch.randint(1 - DISTANCES, DISTANCES, (count,)).masked_fill(own, 0)
    return Slots(refs[0], refs[1], scales[0], scales[1], torch.arange(count), distance)
