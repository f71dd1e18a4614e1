"""Long random runs: no leak, no shared block written, nobody loses or gains an entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.blocks.swap_memory import SwapMemory
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.step.scheduler import Scheduler
from tests.scheduler.traffic import (
    CODES,
    IN_PROMPT,
    KEEPS_BLOCKS,
    LAYOUTS,
    TRIGGERS,
    UNEVEN,
    Loop,
    Traffic,
    assert_all_blocks_come_back,
    make_scheduler,
    make_sequence,
)
from tests.thinning import slow

OPERATIONS = 400


def seeds(end: int, begin: int = 0) -> pytest.MarkDecorator:
    """Some runs, and the ten that follow as a slow test."""
    others = pytest.param(range(end, end + 10), marks=pytest.mark.slow)
    return pytest.mark.parametrize("seeds", [range(begin, end), others], ids=["first", "others"])


def played(
    seeds: Iterable[int],
    operations: int,
    policies: set[int] | None = None,
    how: Callable[[int], dict[str, Any]] = lambda seed: {},
) -> Counter[str]:
    """What happened in random runs; ``how`` each of them is made."""
    seen: Counter[str] = Counter()
    for seed in seeds:
        traffic = Traffic(seed, policies, **how(seed))
        traffic.run(operations)
        scheduler, loop = traffic.scheduler, traffic.loop
        assert all(min(seq.usage.held_blocks.values(), default=0) >= 0 for seq in traffic.finished)
        compacted = [seq for seq in traffic.finished if seq.usage.compactions]
        assert all(seq.usage.held_tokens > 0 for seq in compacted)
        seen += Counter(
            compactions=scheduler.totals.compactions_total,
            early=scheduler.totals.early_compactions_total,
            preemptions=scheduler.totals.preemptions_total,
            swaps=scheduler.totals.swaps_total,
            recomputed=scheduler.totals.preemptions_total - scheduler.totals.swaps_total,
            hits=traffic.num_hits,
            pruned=traffic.num_pruned,
            added=traffic.num_added,
            finished=len(traffic.finished),
            stopped=sum(seq.stop_token is not None for seq in traffic.finished),
            resumed=loop.shadow.resumed,
            from_host=scheduler.totals.resumed_from_host_total,
            guessed=loop.num_guessed,
            right=loop.num_right,
        )
        seen += scheduler.saved.misses
    return seen


@seeds(5)
def test_random_operations(seeds: range) -> None:
    """All that can happen does happen, and after each operation everything adds up."""
    seen = played(seeds, OPERATIONS)
    assert len(seen) == 10, seen


def test_a_step_that_has_an_event_preempts_nobody_to_do_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row that was computed again lost its blocks behind each of its events, which go first, and
    got them back in the same step: two others were due, and no step had room for their events."""
    schedule, bare = Scheduler.schedule, list[bool]()

    def noted(self: Scheduler) -> SchedulerOutput:
        output = schedule(self)
        events = output.events
        bare.append(bool(events.compactions) and not (output.num_tokens or events.observations))
        return output

    monkeypatch.setattr(Scheduler, "schedule", noted)
    Traffic(614, set(range(27)), further=True).run(200)
    assert any(bare), "no step had an event and nothing else"


def test_a_continuation_that_makes_room_for_its_next_turn_leaves_it_the_remainder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was resumed in the step after the one that saved it, and evicted as it was."""
    release, pinned = SwapMemory.release_place, list[bool]()

    def noted(self: SwapMemory, place: int) -> None:
        pinned.append(place == self.pinned != NO_PLACE)
        release(self, place)

    monkeypatch.setattr(SwapMemory, "release_place", noted)
    Traffic(858, {*range(16), *range(23, 27)}, continuations=True).run(200)
    assert any(pinned), "no turn evicted what it resumed"


@pytest.mark.parametrize(
    ("requests", "operations"), [(100, 220), pytest.param(1_000, 2_300, marks=pytest.mark.slow)]
)
def test_coded_requests_leave_nothing_behind(requests: int, operations: int) -> None:
    """Aborts, preemptions and shared prompts among them; the pool is whole in the end."""
    seen = played((2, 5, 8), operations, CODES)
    assert seen["added"] > requests and seen["finished"] < seen["added"], seen
    assert seen["compactions"] > requests and seen["recomputed"] and seen["hits"], seen


@seeds(5)
def test_steps_that_are_scheduled_before_tokens_are_known(seeds: range) -> None:
    """The same, and sequences that end, are aborted or lose their rows with a token unknown."""
    seen = played(seeds, 300, how=lambda seed: {"overlaps": True})
    assert len(seen) == 10, seen


@seeds(4)
def test_a_further_group_goes_where_rows_go(seeds: range) -> None:
    """A group that only this test knows: through growth, prefixes, swaps, copies, turns, aborts."""
    how = lambda seed: {"continuations": bool(seed % 2), "further": True}  # noqa: E731
    seen = played(seeds, 200, how=how)
    assert all(seen[what] for what in ("swaps", "recomputed", "hits", "resumed")), seen


@seeds(8, 4)
@pytest.mark.parametrize(
    "held", [{"windows": 9}, {"newest": 3}, *slow({"windows": 1}, {"windows": 50}, {"newest": 1})]
)
def test_the_newest_tokens_that_the_next_one_sees_are_held(
    held: dict[str, Any], seeds: range
) -> None:
    """And no more than their window, through all that happens to rows."""

    def how(seed: int) -> dict[str, Any]:
        return {"overlaps": seed % 4 > 1, "continuations": bool(seed % 2), **held}

    seen = played(seeds, 150, how=how)
    assert all(seen[what] for what in ("swaps", "recomputed", "hits", "resumed")), seen


@seeds(4)
@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_guesses_leave_no_trace(overlaps: bool, seeds: range) -> None:
    """Right ones are tokens like others; of wrong ones nothing is held, read or said later."""

    def how(seed: int) -> dict[str, Any]:
        windows = 9 * (seed % 3 == 0)
        continues = {"continuations": bool(seed % 2)}
        return {"overlaps": overlaps, "speculation": True, "windows": windows, **continues}

    seen = played(seeds, 200, how=how)
    assert all(seen[what] for what in ("compactions", "recomputed", "hits", "stopped")), seen
    assert seen["guessed"] > seen["right"] > 100, seen


@seeds(3)
@pytest.mark.parametrize("overlaps", [False, True], ids=["plain", "overlapped"])
def test_clients_take_turns(overlaps: bool, seeds: range) -> None:
    """With a bound on the rows of each, and on the prompts of a step that decodes."""
    how = lambda seed: {"overlaps": overlaps, "continuations": bool(seed % 2), "clients": 4}  # noqa: E731
    seen = played(seeds, 200, how=how)
    assert all(seen[what] for what in ("swaps", "recomputed", "hits", "compactions")), seen


@pytest.mark.parametrize("overlaps", [*slow(False), True], ids=["plain", "overlapped"])
def test_random_conversations(overlaps: bool) -> None:
    """Most requests go on from what others have left."""
    how = {"continuations": True, "overlaps": overlaps}
    seen = played((3, 4, 6, 10), 500, how=lambda seed: how)
    assert seen["resumed"] > 100 and seen["recomputed"] and seen["swaps"], seen
    assert seen["from_host"] > 2, seen
    assert all(seen[cause] for cause in ("new", "tokens", "policy", "evicted")), seen


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "overlaps", "speculation"])
@pytest.mark.parametrize("seed", range(100, 200))
def test_a_million_random_operations(seed: int, mode: str) -> None:
    Traffic(seed, overlaps=mode == "overlaps", speculation=mode == "speculation").run(5_000)


SHARING = [policy for policy in TRIGGERS if policy not in IN_PROMPT | CODES]


def share_a_prefix(policy: int, seed: int) -> int:
    """Rows that begin alike and have their events together on a full pool; how many blocks events
    replaced since others named them."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[1 if policy in UNEVEN else seed % 3]
    blocks = int(rng.integers(12, 60))
    scheduler = make_scheduler(blocks, layout, max_num_batched_tokens=256, prefix_caching=True)
    loop = Loop(scheduler, overlaps=bool(seed % 2))
    replaced, replace = 0, BlockTable.replace_shared

    def counted(table: BlockTable, *where: IntArray) -> IntArray:
        nonlocal replaced
        shared = replace(table, *where)
        replaced += int(shared.sum())
        return shared

    with patch.object(BlockTable, "replace_shared", counted):
        prompt = int(rng.integers(12, 33))
        for i in range(int(rng.integers(3, 9))):
            more = int(rng.integers(3, 30))
            seq = make_sequence(i, prompt + int(rng.integers(4)), more, policy)
            if scheduler.blocks_at_least(seq.num_tokens, seq.max_len, seq.trigger) < blocks:
                scheduler.add(seq)
                if i == 0 and seed % 4:
                    loop.step()  # what it has computed is there for the others
        loop.drain()
        assert_all_blocks_come_back(scheduler)
    return replaced


@pytest.mark.parametrize("seeds", [8, *slow(40)])
@pytest.mark.parametrize("policy", SHARING)
def test_no_event_writes_what_another_reads(policy: int, seeds: int) -> None:
    """The shadow says so; and events do replace blocks that rows share, under most policies."""
    protects = {0, 1, 2, 4, 8, 14, 15, 18, 23, 24, 25, 26}
    replaced = sum(share_a_prefix(policy, seed) for seed in range(seeds))
    assert replaced > 0 or policy in protects | KEEPS_BLOCKS
