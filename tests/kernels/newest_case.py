"""Attention over entries in few bits and the newest ones as they were computed."""

from __future__ import annotations

from typing import Any

import torch

from kvserve.entry_format import EntryFormat
from kvserve.kernels.attention.paged_attention import Newest
from kvserve.kernels.quantized_entries import QuantizedBlocks, store_levels_torch
from kvserve.kernels.query_segments import QuerySegments
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.shares import Shares
from tests.kernels.paged_case import BLOCK, SCALE, Inputs

NEW_BLOCK, WINDOW = 5, 32
EVENTS = [30, 0, 70]
"""How many tokens of each row came before its last event, which has dropped 9 of them."""
DROPPED = 9


class NewestCase:
    """Three rows of 150, 3 and 77 tokens. What no row holds, or may read so, is not a number."""

    def __init__(self, form: EntryFormat, dim: int, dtype: torch.dtype, tables: int = 1) -> None:
        self.held, self.per_row = [150, 3, 77], tables
        heads, size, columns = 4 // tables, 3 * tables, 10
        self.tables = (torch.randperm(size * columns).int() + 1).view(3, tables, columns)
        pool = torch.full((size * columns + 1, 2, heads * form.lane_bytes(BLOCK, dim)), 255)
        self.blocks = QuantizedBlocks(pool.to(torch.uint8), form, BLOCK, dim)
        self.new_tables = (torch.randperm(size * 31).int() + 1).view(3, tables, 31)
        self.exact = torch.full((size * 31 + 1, 2, NEW_BLOCK, heads, dim), torch.nan).to(dtype)
        for row, count in enumerate(self.held):
            k, v = torch.randn(2, count, 4, dim).to(dtype)
            gone = DROPPED if EVENTS[row] else 0
            place = torch.arange(count - gone)
            slots = self.tables[row][:, place // BLOCK].long() * BLOCK + place % BLOCK
            store_levels_torch(self.blocks, 1, slots, k[gone:], v[gone:])
            at = torch.arange(EVENTS[row], count)
            block = self.new_tables[row][:, at // NEW_BLOCK].long()
            for kind, x in enumerate((k, v)):
                own = x[at].unflatten(1, (tables, -1)).transpose(0, 1)
                self.exact[block, kind, at % NEW_BLOCK] = own
        self.q = torch.randn(230, 12, dim).to(dtype)
        bias = torch.full((3, 4), -torch.inf)
        bias[0], bias[2] = 2.0, 1.0
        lost = torch.randn(2, 3, 4, dim)
        self.remainder = Remainder(lost[0], lost[1], bias)
        self.sinks = torch.randn(12)

    def call(self, lengths: list[int]) -> tuple[Inputs, dict[str, Any]]:
        """What attention takes for chunks of the last tokens of rows, without and with names."""
        rows = torch.arange(len(lengths))
        ends = list(zip(self.held, lengths, strict=False))
        at = torch.cat([torch.arange(end - count, end) for end, count in ends])
        events = torch.tensor(EVENTS)[rows.repeat_interleave(torch.tensor(lengths))]
        # Each token sees entries in few bits up to ``last``, and others from ``first`` on.
        first = torch.maximum(at // WINDOW * WINDOW, events)
        last = first - 1 - torch.where(events > 0, DROPPED, 0)
        starts, most = torch.tensor([0, *lengths]).cumsum(0), max(lengths)
        last, to, first_of = (x.expand(self.per_row, -1).contiguous() for x in (last, at, first))
        segments = QuerySegments(rows, last, BLOCK * 10, starts, most)
        own = QuerySegments(rows, to, WINDOW + most, starts, most, first_of)
        # How many of the newest a share is of, and how many of these are in few bits.
        recent = torch.arange(len(at)) % 60 + 1
        shares = Shares(torch.empty(len(at), 12), recent - (at - first + 1))
        q, (k, v) = self.q[: len(at)], self.exact.unbind(1)
        newest = Newest(k, v, self.new_tables, own, recent)
        how = {"shares": shares, "remainder": self.remainder, "sinks": self.sinks}
        inputs = q, *self.blocks.layer(1), self.tables, segments, SCALE
        return inputs, {**how, "newest": newest}
