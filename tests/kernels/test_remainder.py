"""Attention that begins with a remainder: what it must equal, and the compiled kernel beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvserve.engine.cache.remainders import Remainders
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.attend.paged_attention_cpu import paged_attention_cpu
from kvserve.kernels.move.events import add_remainders, add_remainders_torch
from kvserve.kernels.score.fitted_remainder import (
    fitted_remainder,
    fitted_remainder_cpu,
    fitted_remainder_torch,
    log_probs_of,
    probs_of,
)
from kvserve.kernels.score.seen import Given, Seen
from kvserve.kernels.score.window_scores import (
    window_log_sums,
    window_probs,
    window_scores,
    window_scores_cpu,
    window_scores_torch,
)
from kvserve.kernels.score.window_scores_triton import log_given_triton, window_scores_triton
from kvserve.kernels.store.int4_log import Int4Queries, quantize
from kvserve.kernels.store.remainder import Remainder, merged
from kvserve.scheduler.layout import Granularity, KVLayout
from tests.kernels.paged_case import SCALE, Shape, make, random_remainder

NOTHING = -torch.inf


def test_it_is_one_more_entry_with_a_weight() -> None:
    """By hand: a row of 5 entries, and one that counts for 7."""
    case = make(Shape(heads=2, kv_heads=1, block=8, columns=1), [5], [1])
    key, value = torch.randn(2, case.query.shape[-1])
    left = Remainder(key[None, None], value[None, None], torch.tensor([[7.0]]).log())
    found = paged_attention_torch(*case.inputs(), remainder=left)
    entries = int(case.last[0, 0, 0]) + 1
    block = int(case.tables[0, 0, 0, 0])
    keys = torch.cat([case.keys[block, :entries, 0], key.expand(7, -1)])
    values = torch.cat([case.values[block, :entries, 0], value.expand(7, -1)])
    expected = torch.softmax(case.query[0] @ keys.T * SCALE, dim=-1) @ values
    torch.testing.assert_close(found[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.compiler
@pytest.mark.parametrize("entry", [0, 3, 39])
def test_a_remainder_of_one_entry_is_that_entry_kept(entry: int) -> None:
    """Drop any entry, let the remainder stand for it alone: attention is as it was."""
    case = make(Shape(block=8), [40, 40], [1, 1])
    keys, values = case.keys.nan_to_num(), case.values.nan_to_num()
    last = torch.full_like(case.last, 39)
    full = replace(case, keys=keys, values=values, last=last)
    fewer = replace(full, keys=keys.clone(), values=values.clone(), last=last - 1)
    rows, heads = case.tables.shape[1], case.keys.shape[2]
    vectors = torch.zeros(2, rows, heads, case.query.shape[2])
    left = Remainder(vectors[0], vectors[1], torch.zeros(rows, heads))
    for row in range(2):
        at, end = ((case.tables[0, row, 0, e // 8].long(), e % 8) for e in (entry, 39))
        for mine, kept in zip(left, (fewer.keys, fewer.values), strict=False):
            mine[row] = kept[at]
            kept[at] = kept[end]
    expected = paged_attention_cpu(*full.inputs())
    for attend in (paged_attention_cpu, paged_attention_torch):
        found = attend(*fewer.inputs(), remainder=left)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_alike_entries_dropped_one_by_one_are_all_there() -> None:
    """Of alike keys the running mean is exact, whatever their values: nothing is lost."""
    entries, dim = 12, 16
    query, keys, values = torch.randn(dim), torch.randn(3, dim), torch.randn(entries + 2, dim)
    one = Remainder(keys[:1], values[:1], torch.zeros(1))
    for i in range(1, entries):
        one = merged(one, Remainder(keys[:1], values[i : i + 1], torch.zeros(1)))
    torch.testing.assert_close(one.bias.exp(), torch.tensor([float(entries)]))
    logits = torch.cat([one.keys @ query + one.bias, keys[1:] @ query])
    found = torch.softmax(logits, 0) @ torch.cat([one.values, values[entries:]])
    every = torch.cat([keys[:1].expand(entries, -1), keys[1:]]) @ query
    torch.testing.assert_close(found, torch.softmax(every, 0) @ values)


def test_merging_with_nothing_changes_nothing() -> None:
    some = random_remainder(2, 3, 8)
    unknown = torch.full_like(some.keys, torch.nan)
    nothing = Remainder(unknown, unknown, torch.full_like(some.bias, NOTHING))
    for both in (merged(some, nothing), merged(nothing, some)):
        assert torch.equal(both.bias, some.bias)
        there = some.bias > NOTHING
        assert torch.equal(both.keys[there], some.keys[there])
        assert torch.equal(both.values[there], some.values[there])


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("absolute", [False, True])
def test_what_scoring_finds_on_its_way(absolute: bool, dtype: torch.dtype) -> None:
    """Log-sums and what each key got, in the same pass as the scores."""
    queries, shares = torch.randn(2, 3, 8, 37, 32), -torch.rand(2, 3, 8, 37)
    log = quantize(queries, shares)
    keys = torch.randn(2, 3, 2, 37, 32).to(dtype)
    seen = Seen(log.shares, 32, later=5) if absolute else None
    length = 32 if absolute else 37
    given = Given(torch.empty(2, 3, 8, 37), torch.empty(2, 3, 2, length))
    scores = window_scores_cpu(log, keys, 0.2, "sum_squares", "rms", seen, given)
    assert torch.equal(scores, window_scores(log, keys, 0.2, "sum_squares", "rms", seen))
    sums = window_log_sums(log, keys, 0.2, seen)
    torch.testing.assert_close(given.log_sums, sums, rtol=1e-4, atol=1e-4)
    probs = window_probs(log, keys, 0.2, seen).sum(dim=(-3, -2))
    torch.testing.assert_close(given.keys, probs, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("device")
def test_what_triton_s_scoring_finds_on_its_way() -> None:
    log = quantize(torch.randn(1, 2, 4, 21, 16), -torch.rand(1, 2, 4, 21))
    keys, seen = torch.randn(1, 2, 2, 21, 16), Seen(log.shares, 16, later=5)
    ours, theirs = (Given(torch.empty(1, 2, 4, 21), torch.empty(1, 2, 2, 16)) for _ in range(2))
    how = log, keys, 0.3, "sum_squares", "rms", seen
    scores, expected = window_scores_triton(*how, ours), window_scores_torch(*how, theirs)
    for found, wanted in zip((scores, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for sharp in (1.0, 300.0):  # the sum itself is then less than any float
        one = keys[..., :1, :] * -sharp
        given = log_given_triton(log, one, theirs.log_sums, 0.3)
        logits = log_probs_of(log, one, theirs.log_sums, 0.3)
        torch.testing.assert_close(given, logits.logsumexp(dim=(-3, -2)), rtol=1e-4, atol=1e-4)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 24, 64, 128])
def test_a_compiled_fit_is_that_of_torch(dim: int, dtype: torch.dtype) -> None:
    """Also of keys that lie as an event reads them, and as those of one event alone."""
    log = quantize(torch.randn(3, 2, 6, 21, dim), -torch.rand(3, 2, 6, 21))
    keys, values = (torch.randn(2, 2, 3, 30, dim).to(dtype).permute(2, 0, 1, 3, 4) for _ in "kv")
    dropped = torch.rand(3, 2, 2, 30) > 0.4
    dropped[1, 0, 1] = False
    sums = window_log_sums(log, keys, 0.2)
    given = Given(sums, probs_of(log, keys, sums, 0.2).sum(dim=(-3, -2)))
    left = fitted_remainder_cpu(log, keys, values, dropped, given, 0.2)
    assert left.bias[1, 0, 1] == NOTHING
    expected = fitted_remainder_torch(log, keys, values, dropped, given, 0.2)
    torch.testing.assert_close(left, expected, rtol=1e-4, atol=1e-5)
    queries, shared = Int4Queries(*(x[1:2] for x in log)), Given(*(x[1:2] for x in given))
    own = fitted_remainder_cpu(queries, keys[1:2], values[1:2], dropped[1:2], shared, 0.2)
    assert all(torch.equal(x[1:2], y) for x, y in zip(left, own, strict=True))


@pytest.mark.parametrize("form", ["numbers", "int4"])
def test_a_fit_meets_the_mass_of_what_is_dropped(form: str) -> None:
    queries, keys = torch.randn(2, 8, 20, 16), torch.randn(2, 2, 30, 16)
    values, dropped = torch.randn(2, 2, 30, 16), torch.rand(2, 2, 30) > 0.4
    dropped[0, 1] = False
    log = queries if form == "numbers" else quantize(queries, -torch.rand(2, 8, 20))
    sums = window_log_sums(log, keys, 0.3)
    given = Given(sums, probs_of(log, keys, sums, 0.3).sum(dim=(-3, -2)))
    left = fitted_remainder(log, keys, values, dropped, given, 0.3)
    assert left.bias[0, 1] == NOTHING and left.bias[1].isfinite().all()
    mass = (given.keys * dropped).sum(-1)
    one = probs_of(log, left.numbers()[0][..., None, :], sums, 0.3).sum(dim=(-3, -2))[..., 0]
    torch.testing.assert_close(one[1] * left.bias[1].exp(), mass[1], rtol=1e-3, atol=1e-4)
    weights = (given.keys * dropped)[1, 0]
    torch.testing.assert_close(left.keys[1, 0], weights @ keys[1, 0] / weights.sum())
    torch.testing.assert_close(left.values[1, 0], weights @ values[1, 0] / weights.sum())


@pytest.mark.parametrize("form", ["numbers", "int4"])
def test_sharp_queries_leave_a_weight_that_is_a_number(form: str) -> None:
    """No query points to the mean of what is dropped: what it gets is less than any float."""
    keys = torch.randn(1, 2, 30, 16) * 8
    queries = keys.repeat_interleave(4, dim=1)[:, :, :20] * 8
    values, dropped = torch.randn(1, 2, 30, 16), torch.ones(1, 2, 30, dtype=torch.bool)
    log = queries if form == "numbers" else quantize(queries, -torch.rand(1, 8, 20))
    sums = window_log_sums(log, keys, 1.0)
    given = Given(sums, probs_of(log, keys, sums, 1.0).sum(dim=(-3, -2)))
    left = fitted_remainder(log, keys, values, dropped, given, 1.0)
    assert all(part.isfinite().all() for part in left) and (left.bias > 100).all()
    expected = fitted_remainder_torch(log, keys, values, dropped, given, 1.0)
    torch.testing.assert_close(left, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.compiler
def test_what_rows_have_lost_is_merged_in_place() -> None:
    """Lanes that had lost nothing, or lose nothing now, hold anything there; other rows stay."""
    lanes = [random_remainder(7, 4, 16) for _ in range(2)]
    whole = Remainder(*(torch.stack(parts).contiguous() for parts in zip(*lanes, strict=True)))
    more = random_remainder(4 * 2, 4, 16)
    more = Remainder(*(part.unflatten(0, (4, 2)) for part in more))
    rows = torch.tensor([5, 0, 3, 6])
    expected = Remainder(*(part.clone() for part in whole))
    add_remainders_torch(expected, rows, more)
    add_remainders(whole, rows, more)
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    assert (whole.bias == NOTHING).any()
    before = whole.bias.clone()
    for wrong in (7, -1):
        with pytest.raises(IndexError, match=f"row {wrong} "):
            add_remainders(whole, torch.tensor([0, wrong]), more.at(slice(2)))
    assert torch.equal(whole.bias, before)


@pytest.mark.parametrize("merge", [add_remainders, add_remainders_torch])
def test_a_late_event_is_not_lost(merge: Callable[..., None]) -> None:
    """What an engine holds is the mean of all that 600 events dropped, whatever the model's dtype:
    bfloat16 would not change by a 600th."""
    layout = KVLayout(1, 2, 16, 16, Granularity.MODEL)
    whole = Remainders(layout, 3, "cpu", lambda left, *_, **__: left).whole
    dropped = torch.randn(600, 2, 16).bfloat16()
    for keys in dropped:
        one = Remainder(keys[None, None], -keys[None, None], torch.zeros(1, 1, 2))
        merge(whole, torch.tensor([1]), one)
    mean = dropped.double().mean(dim=0)
    torch.testing.assert_close(whole.keys[0, 1].double(), mean, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole.values[0, 1].double(), -mean, atol=1e-6, rtol=1e-5)
