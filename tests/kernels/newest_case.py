"""Attention over entries in few bits and the newest ones as they were computed, for each kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.entry_format import EntryFormat
from kvserve.kernels.attention.paged_attention import Newest, paged_attention_torch
from kvserve.kernels.attention.paged_attention_cpu import (
    CpuQuerySegments,
    begin_attention,
    paged_attention,
)
from kvserve.kernels.quantized_entries import TORCH, QuantizedBlocks
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares

BLOCK, NEW_BLOCK, WINDOW, SCALE = 16, 5, 32, 0.3
EVENTS = [30, 0, 70]
"""How many tokens of each row came before its last event, which has dropped 9 of them."""
DROPPED = 9


class NewestCase:
    """Three rows of 150, 3 and 77 tokens. What no row holds, or may read so, is not a number."""

    def __init__(self, form: EntryFormat, dim: int, dtype: torch.dtype, tables: int = 1) -> None:
        generator = torch.Generator().manual_seed(3)
        self.seen, self.tables_per_row = [150, 3, 77], tables
        heads, self.dtype = 4 // tables, dtype
        size, columns = 3 * tables, 10
        names = torch.randperm(size * columns, generator=generator).int() + 1
        self.tables = names.view(3, tables, columns)
        pool = torch.full((size * columns + 1, 2, heads * form.lane_bytes(BLOCK, dim)), 255)
        self.blocks = QuantizedBlocks(pool.to(torch.uint8), form, BLOCK, dim)
        names = torch.randperm(size * 31, generator=generator).int() + 1
        self.new_tables = names.view(3, tables, 31)
        shape = size * 31 + 1, 2, NEW_BLOCK, heads, dim
        self.exact = torch.full(shape, torch.nan).to(dtype)
        for row, count in enumerate(self.seen):
            k, v = torch.randn(2, count, 4, dim, generator=generator).to(dtype)
            gone = DROPPED if EVENTS[row] else 0
            place = torch.arange(count - gone)
            slots = self.tables[row][:, place // BLOCK].long() * BLOCK + place % BLOCK
            TORCH.store(self.blocks, 1, slots, k[gone:], v[gone:])
            at = torch.arange(EVENTS[row], count)
            block = self.new_tables[row][:, at // NEW_BLOCK].long()
            for kind, x in enumerate((k, v)):
                own = x[at].unflatten(1, (tables, -1)).transpose(0, 1)
                self.exact[block, kind, at % NEW_BLOCK] = own
        self.q = torch.randn(230, 12, dim, generator=generator).to(dtype)
        lost = torch.randn(2, 3, 4, dim, generator=generator)
        bias = torch.full((3, 4), -torch.inf)
        bias[0], bias[2] = 2.0, 1.0
        self.remainder = Remainder(lost[0], lost[1], bias)
        self.sinks = torch.randn(12, generator=generator)

    def inputs(self, lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Of chunks of the last tokens of rows: first tokens of chunks; what each token sees of
        entries in few bits, and from where on of the others; its position; of how many a share
        is."""
        rows = list(zip(range(3), lengths, strict=False))
        at = torch.cat([torch.arange(self.seen[row] - n, self.seen[row]) for row, n in rows])
        owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(lengths))
        events = torch.tensor(EVENTS)[owner]
        first = torch.maximum(at // WINDOW * WINDOW, events)
        last = first - 1 - torch.where(events > 0, DROPPED, 0)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        recent = torch.arange(len(at)) % 60 + 1
        return starts, last, first, at, recent

    def of_torch(self, lengths: list[int], cap: float = 0.0) -> tuple[Tensor, Tensor]:
        """Attention, and the newest entries' shares; the reference."""
        starts, last, first, at, recent = self.inputs(lengths)
        segments, newest = self.parts(starts, last, first, at, recent)
        shares = Shares(torch.empty(len(at), 12), recent - (at - first + 1))
        beside = None, shares, self.remainder, self.sinks, cap, newest
        q, (keys, values) = self.q[: len(at)], self.blocks.layer(1)
        out = paged_attention_torch(q, keys, values, self.tables, segments, SCALE, *beside)
        return out, shares.out

    def parts(
        self, starts: Tensor, last: Tensor, first: Tensor, at: Tensor, recent: Tensor
    ) -> tuple[QuerySegments, Newest]:
        """As the reference and the Triton kernel take them."""
        rows, most = torch.arange(len(starts) - 1), int(starts.diff().max())
        lanes = self.tables_per_row, len(at)
        wide = [x.int().expand(lanes).contiguous() for x in (last, at, first)]
        segments = QuerySegments(rows, wide[0], BLOCK * 10, starts, most)
        own = QuerySegments(rows, wide[1], WINDOW + most, starts, most, wide[2])
        k, v = self.exact.unbind(1)
        return segments, Newest(k, v, self.new_tables, own, recent)

    def of_cpu(self, lengths: list[int], cap: float = 0.0) -> tuple[Tensor, Tensor]:
        starts, last, first, at, recent = self.inputs(lengths)
        rows, lanes = torch.arange(len(starts) - 1), (1, self.tables_per_row, len(at))
        wide = [x.expand(lanes).contiguous() for x in (last, at, first)]
        q = self.q[: len(at)]
        own = CpuQuerySegments(rows, starts, wide[1], wide[2])
        wanted = Shares(torch.empty(len(at), 12), recent)
        k, v = self.exact.unbind(1)
        begun = begin_attention(q, k, v, self.new_tables[None], own, 0, SCALE, wanted, cap)
        shares = Shares(torch.empty(len(at), 12), recent - (at - first + 1))
        chunks = CpuQuerySegments(rows, starts, wide[0])
        beside = None, shares, self.remainder, self.sinks, cap, begun
        keys, values = self.blocks.layer(1)
        out = paged_attention(q, keys, values, self.tables[None], chunks, 0, SCALE, *beside)
        return out, shares.out
