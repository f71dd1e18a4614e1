"""Rows that outlive their sequences: who goes on from which, what is shared, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.continuations import Continuations
from kvserve.scheduler.column_hash import salted_seed
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.recovery import start_over
from kvserve.scheduler.triggers.trigger import RowState
from tests.scheduler.shadow import ShadowRunner
from tests.scheduler.traffic import (
    CODES,
    KEEP_SCORES,
    LAYOUTS,
    TRIGGERS,
    Loop,
    kind_of,
    make_scheduler,
    policies_of,
)

KARA = 1
"""A window of 16 of which 4 open the next and 4 of the others stay, looked for every 4 steps."""
TURNS = ((21, 30), (9, 22), (3, 8), (17, 12))
"""New prompt tokens and answers."""


NOT_COMPARED = {0, 14} | CODES | KEEP_SCORES
"""``none``, one that goes by the engine's steps, and those that leave nothing."""


class Talks:
    """A scheduler that keeps what sequences leave, and turns of conversations in it."""

    def __init__(self, num_blocks: int = 200, **settings: Any) -> None:
        self.scheduler = make_scheduler(num_blocks, continuations=True, **settings)
        self.loop = Loop(self.scheduler)
        self._ids = 0

    @property
    def store(self) -> Continuations:
        return self.scheduler.saved.store

    def turn(self, tokens: Any, output: int = 10, policy: int = KARA,
             **fields: Any) -> Sequence:  # fmt: skip
        """A request that is answered whole."""
        seq = self.sequence(tokens, output, policy, **fields)
        self.scheduler.add(seq)
        self.loop.drain()
        return seq

    def sequence(self, tokens: Any, output: int, policy: int = KARA, **fields: Any) -> Sequence:
        self._ids += 1
        seq = make(self._ids, np.array(tokens, np.int32), len(tokens), len(tokens) + output, policy)
        seq.talk.continues_as = policy
        for name, value in fields.items():
            setattr(seq if hasattr(seq, name) else seq.talk, name, value)
        return seq


def make(seq_id: int, tokens: IntArray, prompt: int, max_len: int, policy: int) -> Sequence:
    trigger = TRIGGERS[policy]
    seq = Sequence(seq_id, tokens, prompt, max_len, (), policy, trigger, kind_of(policy))
    seq.leaves_remainder = True
    if trigger.prunes_prompt(prompt):
        seq.num_shareable = 0
    return seq


def more(seq: Sequence, count: int = 5, drop: int = 0) -> IntArray:
    """All tokens of a sequence but the newest ``drop``, and a new prompt behind them."""
    known = seq.token_ids[: seq.num_tokens - drop]
    return np.concatenate([known, np.arange(count, dtype=np.int32) + 60])


def held_in_one(tokens: IntArray, policy: int, layout: Any) -> tuple[Any, int]:
    """What a single sequence holds that is told to say all of ``tokens`` behind its prompt."""
    scheduler = make_scheduler(200, layout, max_model_len=160)
    shadow = ShadowRunner(scheduler)
    first = TURNS[0][0]
    seq = make(0, tokens[:first], first, len(tokens), policy)
    scheduler.add(seq)
    while True:
        output = scheduler.schedule()
        shadow.run(output)
        row = seq.row
        for place in output.sampled_at:
            shadow.last_token[row] = tokens[place]
        held = {lane: list(entries) for lane, entries in shadow.held[row].items()}
        if scheduler.update(output, tokens[output.sampled_at], shadow.scores):
            return held, seq.usage.compactions


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.granularity.value)
def test_turns_hold_what_one_sequence_does(layout: Any) -> None:
    """Every trigger to which a later prompt is more of the same: each entry has seen the same."""
    compared = 0
    for policy in policies_of(layout):
        rows = RowState.of(21, 60, 50, 40)
        known = TRIGGERS[policy].next_turn(rows, np.array([90]))
        if policy in NOT_COMPARED or [int(x[0]) for x in known] != [21, 40]:
            continue
        talks = Talks(layout=layout, max_model_len=160)
        history: IntArray = np.zeros(0, np.int32)
        for turn, (prompt, output) in enumerate(TURNS):
            asked = np.arange(prompt, dtype=np.int32) + 50 + turn
            seq = talks.turn(np.concatenate([history, asked]), output, policy)
            history = seq.token_ids
        expected, compactions = held_in_one(history, policy, layout)
        left = talks.loop.shadow.left[talks.store.all[-1]]
        assert left.lanes == expected and seq.usage.compactions == compactions, policy
        assert compactions, policy
        assert (
            talks.scheduler.totals.resumed_total == 3
            and seq.num_cached_tokens == len(history) - 12 - 17 - 1
        )
        compared += 1
    assert compared >= 7


def test_a_fork_leaves_what_it_goes_on_from() -> None:
    """Several followers write on in blocks of their own; the same one can be taken again."""
    talks = Talks()
    first = talks.turn(range(2, 32), 40)
    (kept,) = talks.store.all
    assert kept.row is not None
    before = [list(lane) for lane in talks.loop.shadow.left[kept].lanes.values()]
    followers = [talks.sequence(more(first, 3 + i), 30) for i in range(3)]
    for seq in followers:
        talks.scheduler.add(seq)
    talks.loop.drain()
    again = talks.turn(more(first, 3), 30)
    assert [s.talk.resumed is not None for s in (*followers, again)] == [True] * 4
    assert np.array_equal(again.token_ids, followers[0].token_ids)
    assert [list(lane) for lane in talks.loop.shadow.left[kept].lanes.values()] == before
    shared = np.concatenate([kept.row.block_ids, kept.row.block_ids])
    assert (talks.scheduler.pool.ref[shared] >= 1).all()


def test_the_last_tokens_may_read_otherwise() -> None:
    """Since the last event nothing but tokens has come, so those may be left out again."""
    talks = Talks()
    first = talks.turn(range(2, 32), 40)
    last = first.events[-1]
    assert 30 < last < first.num_tokens - 2
    for drop in (1, 2, first.num_tokens - last):
        resumed = talks.turn(more(first, 4, drop)).talk.resumed
        assert resumed is not None and resumed.num_tokens == first.num_tokens - max(drop, 1)
    seq = talks.turn(more(first, 4, first.num_tokens - last + 1))
    assert seq.talk.resumed is None and talks.scheduler.saved.misses == Counter(new=1, tokens=1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.granularity.value)
def test_one_that_makes_room_comes_back_from_host_memory(layout: Any) -> None:
    """With all its entries and logged queries, which the shadow device compares; twice."""
    talks = Talks(30, num_host_blocks=100, layout=layout)
    first = talks.turn(range(2, 40), output=30)
    talks.turn(range(70, 150), output=20, policy=0, continues_as=None)  # wants the pool
    assert not len(talks.store) and talks.store.num_hosted == 1
    for _ in range(2):
        second = talks.turn(more(first))
        assert second.talk.resumed is not None
        assert second.usage.compactions >= first.usage.compactions > 0
        talks.turn(range(70, 150), output=20, policy=0, continues_as=None)
    assert (
        talks.scheduler.totals.resumed_from_host_total == 2
        and not talks.scheduler.saved.misses["evicted"]
    )


def test_host_memory_keeps_the_most_recently_used() -> None:
    talks = Talks(30, num_host_blocks=20)
    said = [talks.turn(range(start, start + 38), output=12) for start in (2, 50, 100)]
    talks.turn(range(170, 250), output=20, policy=0, continues_as=None)
    assert 0 < talks.store.num_hosted < 3
    assert (
        talks.turn(more(said[0])).talk.resumed is None
        and talks.scheduler.saved.misses["evicted"] == 1
    )
    assert talks.turn(more(said[2])).talk.resumed is not None


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_others_never_take_it(prefix_caching: bool) -> None:
    """Another policy, other arguments or another salt; and whoever refuses."""
    talks = Talks(prefix_caching=prefix_caching)
    mine = salted_seed("mine")
    first = talks.turn(range(2, 32), 40, cache_seed=mine)
    asked = more(first)
    causes: Counter[str] = Counter(new=1)
    for fields, cause in (
        ({"policy": 2, "cache_seed": mine}, "policy"),
        ({"continues_as": (KARA, "other arguments"), "cache_seed": mine}, "policy"),
        ({"cache_seed": salted_seed("theirs")}, "new"),
        ({}, "new"),
        ({"refuses": "refused", "cache_seed": mine}, "refused"),
        ({"refuses": "unsupported", "continues_as": None, "cache_seed": mine}, "unsupported"),
    ):
        seq = talks.turn(asked, **fields)
        causes[cause] += 1
        assert seq.talk.resumed is None and talks.scheduler.saved.misses == causes, fields
        cached = prefix_caching and fields.get("cache_seed") == mine
        assert bool(seq.num_cached_tokens) == cached, fields
    assert talks.turn(asked, cache_seed=mine).talk.resumed is not None


def test_the_least_recently_used_go_first() -> None:
    """By one clock with prefix columns; who made room is known by name for a while."""
    talks = Talks(40)
    one = talks.turn(range(2, 32), 30)
    two = talks.turn(range(80, 50, -1), 30)
    assert len(talks.store) == 2
    talks.turn(more(one), 4)  # now the other one is older
    used = {known.used for known in talks.store.all if known.taken == 0}
    assert talks.scheduler.pool.clock >= max(used)
    while len(talks.store) == 3:
        talks.turn(range(2 + len(used), 80), 4, policy=0, continues_as=None)
        used.add(-len(used))
    left = [known.token_ids[0] for known in talks.store.all]
    assert left.count(2) >= left.count(80)
    talks.scheduler.blocks.have_free(talks.scheduler.pool.capacity)
    assert not len(talks.store) and talks.scheduler.pool.num_free == talks.scheduler.pool.capacity
    talks.turn(more(two), 4)
    assert talks.scheduler.saved.misses["evicted"] == 1


def test_what_was_continued_goes_before_what_was_not() -> None:
    talks = Talks()
    one = talks.turn(range(2, 32), 30)
    talks.turn(range(80, 50, -1), 30)
    talks.turn(more(one), 30)
    oldest = talks.store.oldest
    assert oldest is not None and len(oldest.token_ids) == one.num_tokens - 1


def test_a_limit_in_blocks() -> None:
    talks = Talks(max_continuation_blocks=40)
    for start in range(2, 60, 7):
        talks.turn(range(start, start + 30), 30)
        assert 0 < talks.store.num_blocks <= 40
    assert 1 <= len(talks.store) <= 3


def test_an_aborted_answer_goes_on_too() -> None:
    """A stop string ends a sequence so; one that has not read its prompt leaves nothing."""
    talks = Talks()
    seq, half = talks.sequence(range(2, 32), 30), talks.sequence(range(40, 100), 30)
    for each in (seq, half):
        talks.scheduler.add(each)
    while seq.row < 0 or talks.scheduler.rows.num_tokens[seq.row] < 45:
        talks.loop.step()
        if half.row >= 0 and half.finish_reason is None:
            talks.scheduler.finish(half, "abort")
    talks.scheduler.finish(seq, "abort")
    assert len(talks.store) == 1
    assert talks.turn(more(seq)).talk.resumed is not None


def test_a_scheduler_that_begins_again_knows_none() -> None:
    """Nobody goes on from blocks of the pool that is gone; followers begin anew."""
    talks = Talks()
    first = talks.turn(range(2, 32), 30)
    seq = talks.sequence(more(first), 30)
    talks.scheduler.add(seq)
    while not seq.talk.resumed:
        talks.loop.step()
    assert seq.talk.resumed is not None and seq.talk.resumed.continuation in talks.store
    before = talks.scheduler.totals.resumed_total
    start_over(talks.scheduler, blamed={-1})
    assert not len(talks.store) and talks.scheduler.totals.resumed_total == before
    Loop(talks.scheduler).drain()
    assert seq.talk.resumed is None and seq.finish_reason == "length" and len(talks.store) == 1


@pytest.mark.parametrize("swaps", [False, True], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("policy", [1, 5, 9, 11, 17, 18, 20, 23])
def test_a_follower_that_makes_way_comes_back(policy: int, swaps: bool) -> None:
    """As it was, from host memory; it begins anew where what it went on from is gone."""
    tokens = []
    for disturbed in (False, True):
        layout = LAYOUTS[1] if policy in (17, 18, 20) else LAYOUTS[0]
        step = {"max_num_batched_tokens": 96}  # policy 20 computes a prompt in one
        talks = Talks(300, layout=layout, num_host_blocks=200 if swaps else 0, **step)
        first = talks.turn(range(2, 23), 30, policy)
        second = talks.turn(more(first, 12), 6, policy)
        other = talks.sequence(range(90, 70, -1), 40, 0, continues_as=None)
        seq = talks.sequence(more(second, 9), 30, policy)
        for each in (other, seq):
            talks.scheduler.add(each)
        while seq.row < 0 or talks.scheduler.rows.num_tokens[seq.row] < seq.num_prompt_tokens + 8:
            talks.loop.step()
        if disturbed:
            talks.store.clear()
            talks.scheduler.departures.preempt()
            assert seq.row < 0
        talks.loop.drain()
        assert talks.scheduler.totals.resumed_total == 2
        assert (seq.talk.resumed is None) == (disturbed and not swaps)
        tokens.append(seq.token_ids.tolist())
    assert len(tokens[0]) == len(tokens[1]) and (not swaps or tokens[0] == tokens[1])
