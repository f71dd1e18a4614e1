"""Random rows over a paged cache, as every kernel of attention takes them; and these kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS, EntryFormat
from kvserve.kernels.attend.paged_attention import Newest, paged_attention_torch
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.attend.query_segments import QuerySegments, Shares
from kvserve.kernels.store.entries import FewLayer, Shaping
from kvserve.kernels.store.few_bits import FewBlocks, store_few_torch
from kvserve.kernels.store.quantized_entries import QuantizedBlocks, store_levels_torch
from kvserve.kernels.store.remainder import Remainder

SCALE = 0.3
COLUMNS = 12
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
Inputs = tuple[Tensor, Any, Any, Tensor, QuerySegments, float]


# ---- kernels ------------------------------------------------------------------------------------


def by_triton(*inputs: Any, **how: Any) -> Tensor:
    """As engines call it: chunks of one token have no starts."""
    q, keys, values, tables, chunks, scale = inputs
    newest = how.get("newest")
    if chunks.max_chunk == 1:
        chunks = chunks._replace(starts=None)
        if newest is not None:
            how["newest"] = newest._replace(chunks=newest.chunks._replace(starts=None))
    return paged_attention_triton(q, keys, values, tables, chunks, scale, **how)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "triton": by_triton,
    "triton-split": partial(by_triton, num_splits=3),
    "triton-in-19": partial(by_triton, num_splits=19),
    "cpu": paged_attention_cpu,
}
TRITON = ["triton", "triton-split"]
EACH_KERNEL = pytest.mark.parametrize(
    "kernel", [*TRITON, pytest.param("cpu", marks=pytest.mark.compiler)]
)


def assert_same(kernel: str, inputs: Inputs, within: float = 0.0, **how: Any) -> Tensor:
    """As the reference, and so are shares, if any are asked for."""
    expected = paged_attention_torch(*inputs, **how)
    within = within or TOLERANCE[expected.dtype]
    shares: Shares | None = how.get("shares")
    wanted = None if shares is None else shares.out.clone()
    if shares is not None:
        shares.out.fill_(torch.nan)
    found = KERNELS[kernel](*inputs, **how)
    torch.testing.assert_close(found, expected, atol=within, rtol=within)
    if shares is not None and wanted is not None:
        seen, close = wanted > -80, 10 * within  # beyond -80, a sink leaves nothing
        torch.testing.assert_close(shares.out[seen], wanted[seen], atol=close, rtol=close)
        assert (shares.out[~seen] < -80).all()
    return found


# ---- numbers ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """Granularities: model (LG, R) = (1, 1), layer (L, 1), head (L, Hkv)."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    block: int = 8
    groups: int = 1
    tables: int = 1
    layers: int = 1
    columns: int = COLUMNS


@dataclass(frozen=True)
class Case:
    """Of layer groups: ``tables [LG, rows, R, M]``, ``last`` and ``first [LG, R, T]``. Blocks that
    no row holds, and entries behind a row's end, are NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    tables: Tensor
    rows: Tensor
    starts: Tensor
    last: Tensor
    first: Tensor | None = None
    always: Tensor | None = None

    def inputs(self, group: int = 0) -> Inputs:
        last, most = self.last[group], int(self.starts.diff().max())
        shown = [None if x is None else x[group] for x in (self.first, self.always)]
        chunks = QuerySegments(self.rows, last, int(last.max()) + 1, self.starts, most, *shown)
        return self.query, self.keys, self.values, self.tables[group], chunks, SCALE

    def shares(self, recent: int = 3) -> Shares:
        count = torch.full((len(self.query),), recent)
        return Shares(torch.empty(self.query.shape[:2], dtype=torch.float32), count)


def make(
    shape: Shape, held: Sequence[int], lengths: Sequence[int], dtype: torch.dtype = torch.float32
) -> Case:
    """Chunk s is the last ``lengths[s]`` tokens of a row of ``held[s]`` entries (in other tables
    and groups: up to 3 fewer). The last row of the tables is nobody's, and the others are the
    chunks' in any order."""
    count, size = len(held), shape.block
    fewer = torch.randint(0, 4, (shape.groups, shape.tables, count))
    ends = (torch.tensor(held) - fewer).clamp(min=0)
    lanes = shape.groups, count, shape.tables
    num_blocks = shape.groups * count * shape.tables * shape.columns + 1
    names = torch.randperm(num_blocks - 1).to(torch.int32) + 1
    nobody = torch.full((shape.groups, 1, shape.tables, shape.columns), -1, dtype=torch.int32)
    tables = torch.cat([names.view(*lanes, shape.columns), nobody], dim=1)
    # Attention reads the last layer of a block.
    cache = torch.randn(
        num_blocks, shape.layers, 2, size, shape.kv_heads // shape.tables, shape.dim
    )
    cache[0] = torch.nan
    rows = torch.randperm(count)
    place = torch.arange(shape.columns * size)
    for group, chunk, table in torch.cartesian_prod(*map(torch.arange, ends.transpose(1, 2).shape)):
        behind = place[place >= ends[group, table, chunk]]
        block = tables[group, rows[chunk], table, behind // size].long()
        cache[block, :, :, behind % size] = torch.nan
    steps = torch.cat([torch.arange(length) - length + 1 for length in lengths])
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(lengths))
    last = (ends[:, :, owner] - 1 + steps).clamp(min=-1)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    # As a model hands queries over: a view of one projection.
    wide = torch.randn(sum(lengths), shape.heads + 3, shape.dim).to(dtype)
    keys, values = cache.to(dtype)[:, shape.layers - 1].unbind(1)
    return Case(wide[:, : shape.heads], keys, values, tables, rows, starts, last)


def windowed(case: Case, window: int, always: int = 0) -> Case:
    """Each token sees its ``window`` newest entries, and up to ``always`` first ones; columns that
    no token of a row's chunk sees name no block, and what no token sees is NaN."""
    size = case.keys.shape[1]
    first = (case.last - window + 1).clamp(min=0)
    ever = (always - torch.arange(first.shape[-1])).clamp(min=0).expand_as(first)
    for chunk, row in enumerate(case.rows.tolist()):
        tokens = slice(int(case.starts[chunk]), int(case.starts[chunk + 1]))
        for group, table in torch.cartesian_prod(*map(torch.arange, first.shape[:2])).tolist():
            least, most = (
                int(first[group, table, tokens].min()),
                int(ever[group, table, tokens].max()),
            )
            names = case.tables[group, row, table]
            for place in range(min(most, least), least):
                at = names[place // size], place % size
                case.keys[at] = case.values[at] = torch.nan
            names[-(-most // size) : least // size] = 0
    return replace(case, first=first, always=ever.contiguous() if always else None)


def random_remainder(rows: int, heads: int, dim: int) -> Remainder:
    """Every third lane has none, and its vectors are NaN."""
    keys, values = torch.randn(2, rows, heads, dim)
    bias = torch.randn(rows, heads) * 2 + 1
    nobody = torch.arange(rows * heads).view(rows, heads) % 3 == 2
    keys[nobody], values[nobody] = torch.nan, torch.nan
    return Remainder(keys, values, bias.masked_fill(nobody, -torch.inf))


# ---- levels -------------------------------------------------------------------------------------

BLOCK = 16


def level_blocks(
    form: EntryFormat, count: int, heads: int, block: int, dim: int, tables: int = 1
) -> QuantizedBlocks | FewBlocks:
    """A pool of two layers. What has not been stored is no number, if the form has such."""
    if not form.few:
        shape = count, 2, form.block_bytes(block, dim, 1, heads)
        return QuantizedBlocks(torch.full(shape, 255, dtype=torch.uint8), form, block, dim)
    layers, at = [], 0
    for own in (FORMATS["k4v4"], form):  # the first is of other bits
        layers.append(FewLayer(own.key, own.value, at, Shaping(torch.zeros(tables * heads, dim))))
        at += replace(own, average=0.0).block_bytes(block, dim, 1, heads)
    pool = torch.full((count, at), 255, dtype=torch.uint8)
    return FewBlocks(pool, tuple(layers), heads, block, dim)


class LevelRows:
    """Three rows of random entries held as levels: layer 1 of a pool of two. What no row holds
    reads as not a number."""

    def __init__(
        self,
        form: EntryFormat,
        dim: int,
        dtype: torch.dtype,
        tables: int = 1,
        held: tuple[int, ...] = (200, 1, 77),
        dropped: tuple[int, ...] = (0, 0, 0),
        block: int = BLOCK,
        group: int = 3,
    ) -> None:
        """Rows of so many entries, less the first ones that have been ``dropped``."""
        self.held, heads, columns = list(held), 4 // tables, -(-max(held) // block)
        names = torch.randperm(len(held) * tables * columns).int() + 1
        self.tables = names.view(len(held), tables, columns)
        self.blocks = level_blocks(form, len(names) + 1, heads, block, dim, tables)
        store: Any = store_few_torch if form.few else store_levels_torch
        self.entries = [torch.randn(2, length, 4, dim).to(dtype) for length in held]
        for row, (both, gone) in enumerate(zip(self.entries, dropped, strict=False)):
            both[1] += 0.3
            place = torch.arange(held[row] - gone)
            slots = self.tables[row][:, place // block].long() * block + place % block
            store(self.blocks, 1, slots, *both[:, gone:])
        self.q = torch.randn(max(held), 4 * group, dim).to(dtype)

    def inputs(self, lengths: Sequence[int], window: int | None = None, always: int = 0) -> Inputs:
        """Chunks of the last tokens of the first rows. With a ``window`` each token sees its newest
        entries, and up to ``always`` first ones; columns that no token sees name no block."""
        last = torch.cat([torch.arange(h - n, h) for h, n in zip(self.held, lengths, strict=False)])
        last = last.expand(self.tables.shape[1], -1).contiguous()
        starts, rows = torch.tensor([0, *lengths]).cumsum(0), torch.arange(len(lengths))
        chunks = QuerySegments(rows, last, max(self.held), starts, max(lengths))
        tables = self.tables.clone()
        if window is not None:
            first = (last - window + 1).clamp(min=0)
            ever = torch.full_like(first, always) if always else None
            chunks = chunks._replace(first=first, always=ever)
            size = self.blocks.layer(1)[0].shape[1]
            for row, least in enumerate(first[0, starts[:-1]].tolist()):
                tables[row, :, -(-min(always, least) // size) : least // size] = 0
        return self.q[: len(last[0])], *self.blocks.layer(1), tables, chunks, SCALE


NEW_BLOCK, WINDOW = 5, 32
EVENTS = [30, 0, 70]
"""How many tokens of each row came before its last event, which has dropped 9 of them."""
DROPPED = 9


class NewestCase(LevelRows):
    """Three rows of 150, 3 and 77 tokens, whose newest entries and first one are held as they were
    computed, too. What no row holds, or may read so, is not a number."""

    def __init__(
        self,
        form: EntryFormat,
        dim: int,
        dtype: torch.dtype,
        tables: int = 1,
        block: int = NEW_BLOCK,
    ) -> None:
        super().__init__(form, dim, dtype, tables, (150, 3, 77), (DROPPED, 0, DROPPED))
        heads, size = 4 // tables, 3 * tables
        self.new_tables = (torch.randperm(size * 31).int() + 1).view(3, tables, 31)
        self.exact = torch.full((size * 31 + 1, 2, block, heads, dim), torch.nan).to(dtype)
        for row, both in enumerate(self.entries):
            # The row's first entry, and what has come since its last event.
            at = torch.tensor([0, *range(max(EVENTS[row], 1), self.held[row])])
            blocks = self.new_tables[row][:, at // block].long()
            for kind, x in enumerate(both):
                own = x[at].unflatten(1, (tables, -1)).transpose(0, 1)
                self.exact[blocks, kind, at % block] = own
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
        # The first one in few bits is not read, but where it is among the newest ones.
        last, to, first_of, one = (
            x.expand(self.tables.shape[1], -1).contiguous()
            for x in (last.masked_fill(last < 1, -1), at, first, torch.ones_like(at))
        )
        segments = QuerySegments(rows, last, BLOCK * 10, starts, most, one)
        own = QuerySegments(rows, to, WINDOW + most, starts, most, first_of, one)
        # How many of the newest a share is of, and how many of these are in few bits.
        recent = torch.arange(len(at)) % 60 + 1
        shares = Shares(torch.empty(len(at), 12), recent - (at - first + 1))
        q, (k, v) = self.q[: len(at)], self.exact.unbind(1)
        newest = Newest(k, v, self.new_tables, own, recent)
        how = {"shares": shares, "remainder": self.remainder, "sinks": self.sinks}
        inputs = q, *self.blocks.layer(1), self.tables, segments, SCALE
        return inputs, {**how, "newest": newest}
