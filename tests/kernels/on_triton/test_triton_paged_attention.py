"""Paged attention: the torch reference against plain softmax, Triton against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve.kernels.attention import paged_attention_triton as launcher
from kvserve.kernels.attention.paged_attention import paged_attention_torch
from kvserve.kernels.attention.paged_attention_triton import paged_attention_triton
from kvserve.kernels.query_segments import QuerySegments

pytestmark = pytest.mark.usefixtures("device")

BLOCKS = 40
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


class Case:
    """Random rows over a cache whose unheld entries are nan, as freed blocks may be."""

    def __init__(
        self,
        tables: int,
        heads: int,
        group: int,
        dim: int,
        block: int,
        dtype: torch.dtype,
        lengths: list[int],
        chunks: list[int] | None = None,
    ) -> None:
        """``lengths``: of each chunk's rows, with its tokens; row r holds r entries fewer."""
        held = (torch.tensor(lengths)[:, None] - torch.arange(tables)).clamp(min=0)
        columns = max(1, -(-max(lengths) // block))
        count = len(lengths) * tables * columns
        blocks = torch.randperm(max(BLOCKS, count + 1) - 1)[:count] + 1
        # Row 0 is nobody's, and chunks have the others in reverse.
        nobody = torch.full((1, tables, columns), -1)
        own = blocks.view(len(lengths), tables, columns)
        self.tables = torch.cat([nobody, own.flip(0)]).int()
        self.rows = torch.arange(len(lengths), 0, -1)
        self.scale = dim**-0.5
        # Two layers in a block, of which this is the second.
        cache = torch.full((max(BLOCKS, count + 1), 2, 2, block, heads, dim), math.nan, dtype=dtype)
        self.keys, self.values = cache[:, 1, 0], cache[:, 1, 1]
        place = torch.arange(columns * block)
        for p, r in torch.cartesian_prod(torch.arange(len(lengths)), torch.arange(tables)):
            some = place[: int(held[p, r])]
            at = own[p, r, some // block], some % block
            for x in (self.keys, self.values):
                x[at] = torch.randn(len(some), heads, dim).to(dtype)
        sizes = torch.tensor(chunks or [1] * len(lengths))
        self.max_chunk = int(sizes.max())
        self.starts = None if chunks is None else torch.tensor([0, *chunks]).cumsum(0).int()
        self.owner = torch.arange(len(lengths)).repeat_interleave(sizes)
        behind = torch.cat([torch.arange(int(n) - 1, -1, -1) for n in sizes])
        self.last = (held[self.owner].T - 1 - behind).clamp(min=-1).int().contiguous()
        # As a model hands queries over: a view of one projection.
        q_heads = tables * heads * group
        self.q = torch.randn(len(self.owner), q_heads + 2, dim).to(dtype)[:, :q_heads]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, QuerySegments, float]:
        most = int(self.last.max()) + 1
        chunks = QuerySegments(self.rows, self.last, most, self.starts, self.max_chunk)
        return self.q, self.keys, self.values, self.tables, chunks, self.scale

    def torch(self) -> Tensor:
        return paged_attention_torch(*self.inputs)

    def triton(self, num_splits: int | None = None) -> Tensor:
        return paged_attention_triton(*self.inputs, num_splits)

    def assert_same(self, num_splits: int | None = None) -> None:
        tolerance = TOLERANCE[self.q.dtype]
        found = self.triton(num_splits)
        torch.testing.assert_close(found, self.torch(), atol=tolerance, rtol=tolerance)


def test_reference_against_plain_softmax() -> None:
    case = Case(2, 2, 3, 16, 4, torch.float32, [9, 0, 6], [3, 1, 6])
    out = case.torch()
    for t in range(len(case.q)):
        for h in range(case.q.shape[1]):
            r, kv_head = divmod(h // 3, 2)
            place = torch.arange(int(case.last[r, t]) + 1)
            at = case.tables[case.rows[case.owner[t]], r, place // 4].long(), place % 4, kv_head
            probs = torch.softmax(case.keys[at] @ case.q[t, h] * case.scale, dim=0)
            torch.testing.assert_close(out[t, h], probs @ case.values[at])


SHAPES = [
    # tables, heads, group, dim, block, dtype
    partial(Case, 1, 2, 4, 64, 16, torch.float16),
    partial(Case, 2, 1, 7, 128, 32, torch.float32),
    partial(Case, 1, 2, 1, 32, 5, torch.float32),
    partial(Case, 1, 1, 20, 16, 256, torch.float16),
    pytest.param(partial(Case, 8, 1, 4, 128, 64, torch.bfloat16), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode(shape: Callable[..., Case], num_splits: int) -> None:
    """Ragged rows; an empty one and one shorter than its share of the splits among them."""
    shape(lengths=[150, 0, 3, 65]).assert_same(num_splits)


def test_a_long_row_is_split_beside_short_ones(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of 64 entries at least: most rows fill one, and what theirs left behind is not read."""
    monkeypatch.setattr(launcher, "_splits", lambda *_: (4, 64))
    case = Case(1, 2, 2, 32, 16, torch.float32, [150, 40, 0, 64, 65])
    empty = torch.Tensor.new_empty

    def poisoned(x: Tensor, *shape: Any, **options: Any) -> Tensor:
        made = empty(x, *shape, **options)
        return torch.full_like(made, torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    case.assert_same()


@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_over_held_context(shape: Callable[..., Case]) -> None:
    """A chunk of several query tiles, one of a single token, an empty one, one without context."""
    shape(lengths=[90, 41, 50, 21], chunks=[23, 1, 0, 21]).assert_same()


def test_chunks_split_over_the_context() -> None:
    Case(1, 1, 2, 32, 16, torch.float32, [150, 21], [3, 21]).assert_same(num_splits=2)


def test_limits_of_an_observation_pass() -> None:
    """Every third token of a window, each seeing what lies up to its own entry."""
    case = Case(1, 2, 2, 32, 16, torch.float32, [70, 52], [8, 8])
    case.last = torch.cat([torch.arange(0, 23, 3) + 40, torch.arange(8) * 3 + 28])[None].int()
    case.assert_same()


def test_blocks_outside_of_the_cache_are_not_seen() -> None:
    case = Case(1, 1, 2, 16, 16, torch.float32, [40, 40])
    expected = case.torch()
    row = case.rows[0]
    case.tables[row, 0, 1:] = torch.tensor([len(case.keys), -1])
    found = case.triton()
    case.last[0, 0] = 15
    case.tables[row, 0, 1:] = 0
    torch.testing.assert_close(found, case.torch())
    torch.testing.assert_close(found[1], expected[1])


@pytest.mark.usefixtures("untouched_memory")
def test_offsets_exceed_31_bits() -> None:
    case = Case(1, 2, 2, 32, 16, torch.float16, [20])
    expected = case.torch()
    cache = torch.empty(1_100_000, 2, 16, 2, 32, dtype=torch.float16)
    assert cache[:, 0].stride(0) * len(cache) > 2**31
    far = torch.arange(len(cache) - 2, len(cache), dtype=torch.int32)
    for i, near in enumerate((case.keys, case.values)):
        cache[far.long(), i] = near[case.tables[1, 0].long()]
    case.tables[1, 0] = far
    case.keys, case.values = cache[:, 0], cache[:, 1]
    torch.testing.assert_close(case.triton(), expected, atol=2e-3, rtol=2e-3)
