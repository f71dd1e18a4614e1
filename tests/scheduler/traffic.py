"""Random operations on a scheduler, followed by a shadow of the device and checked after each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.cache_group import GroupSpec
from kvserve.scheduler.blocks.code_group import CodeSpec
from kvserve.scheduler.blocks.window_group import FirstSpec, NewestSpec, WindowSpec
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.messages.drafts import Confirmed
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.speculation.settings import NgramSettings
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic, QuantizeTrigger
from kvserve.scheduler.triggers.pruning import Pruned, Taper
from kvserve.scheduler.triggers.summing import Summing
from kvserve.scheduler.triggers.trigger import (
    AtPrefillEnd,
    Bounded,
    EventKind,
    EveryStep,
    Never,
    Trigger,
    WhenOver,
)
from tests.scheduler.shadow import ShadowRunner, content


class WholeBlocks(Budget):
    """Blocks of four, and the partial one behind them."""

    def of(self, n: IntArray, seen: IntArray | None = None) -> IntArray:
        return np.minimum(n, super().of(n, seen) // 4 * 4 + n % 4)


class Halves(Taper):
    """Half of what a layer computes goes on to the next one."""

    def of(self, layer: int, num_layers: int) -> float:
        return 0.5


TRIGGERS: dict[int, Trigger] = {
    0: Never(),
    1: Periodic(16, 4, 4, 4),
    2: Periodic(9, 0, 5, 3),
    3: Periodic(12, 3, 2, 5, protect_prompt=False),
    4: Periodic(12, 3, 2, 1, logs=False),
    5: AtPrefillEnd(Budget(tokens=10), num_queries=4),
    6: AtPrefillEnd(Budget(ratio=Fraction(1, 3), least=5), num_queries=0),
    7: WhenOver(24, 15, num_queries=5, protect_prompt=False),
    8: WhenOver(17, 9, num_queries=3, protect_prompt=True),
    9: Bounded(10, 19, num_queries=4),
    10: Bounded(7, 15, num_queries=2, block=6),
    11: Bounded(9, None, num_queries=0, block=5),
    12: EveryStep(14),
    13: EveryStep(9, generated=False),
    14: EngineWide(window=8, buffer=2, keep=3, period=5, most=2),
    15: Periodic(14, 2, 4, 25),
    16: AtPrefillEnd(Budget(tokens=10), num_queries=4),
    17: WhenOver(24, 15, num_queries=5, protect_prompt=False),
    18: WhenOver(17, 9, num_queries=3, protect_prompt=True),
    19: AtPrefillEnd(WholeBlocks(tokens=12), num_queries=4),
    20: Pruned(0.2, 3, Halves(0), 1, 5, Taper(0.1), 0.9),
    21: QuantizeTrigger(Budget(ratio=Fraction(2, 3), least=4), num_queries=4, period=8),
    22: QuantizeTrigger(
        Budget(ratio=Fraction(1), least=4), num_queries=4, period=4, raw_fallback=False
    ),
    23: Periodic(10, 2, 3, 2, protect_turns=True),
    24: Periodic(15, 6, 4, 2, log_stride=3),
    25: Periodic(12, 4, 3, 5, protect_turns=True, log_stride=2),
    26: Summing(12, 4, 3, 4),
}
UNEVEN = {16, 17, 18, 19, 20, 21, 22}
"""What events of these keep differs by layer or head, and is known only once they are observed."""
KEEPS_BLOCKS = {19}
"""Of these, whole blocks stay where they are."""
CODES = {21, 22}
"""Of these, what is held becomes codes; only tables by head can hold such rows."""
IN_PROMPT = {10, 11, 20}
"""These have events before the prompt is in, or are computed whole."""
KEEP_SCORES = {12, 13, 26}
"""What these know of a row is not all in its blocks."""
LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4)
LAYOUTS = [replace(LAYOUT, granularity=granularity) for granularity in Granularity]


def kind_of(policy: int) -> EventKind:
    """What decides how much events of a policy keep."""
    if policy in KEEPS_BLOCKS:
        return EventKind.BLOCKS
    if policy in CODES:
        return EventKind.CODED
    if isinstance(TRIGGERS[policy], Pruned):
        return EventKind.PRUNED
    return EventKind.UNEVEN if policy in UNEVEN else EventKind.EVEN


def policies_of(layout: KVLayout) -> list[int]:
    """Those that can run in a layout."""
    coded = CODES if layout.granularity is not Granularity.HEAD else set()
    return [i for i in TRIGGERS if i not in coded and (i not in UNEVEN or layout != LAYOUT)]


def make_scheduler(
    num_blocks: int = 60, layout: KVLayout = LAYOUT, **settings: object
) -> Scheduler:
    """``num_blocks`` of all layers and heads; finer layouts have more, smaller ones."""
    defaults: dict[str, object] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
        "log_block_tokens": 8,
        "admission_reserve": 4,
    }
    merged: dict[str, Any] = {**defaults, **settings}
    host = merged.pop("num_host_blocks", 0) * layout.groups
    codes = CodeSpec(24)
    if layout.granularity is Granularity.HEAD:
        merged["further_groups"] = codes, *merged.get("further_groups", ())
    blocks = {"num_blocks": num_blocks * layout.groups, "num_host_blocks": host}
    return Scheduler(layout, SchedulerSettings(**blocks, **merged))


def make_sequence(
    seq_id: int,
    prompt: int,
    output: int,
    policy: int,
    *,
    first: int = 2,
    priority: int = 0,
    stops: tuple[int, ...] = (),
    history: IntArray | None = None,
    continues: bool = False,
) -> Sequence:
    """A sequence whose prompt counts up from ``first``; equal firsts share their prefixes.

    ``history`` comes before that. With ``continues``, who can takes continuations, and leaves some.
    """
    tokens = np.arange(prompt, dtype=np.int32) + first
    if history is not None:
        tokens, prompt = np.concatenate([history, tokens]), prompt + len(history)
    max_len = prompt + output
    trigger = TRIGGERS[policy]
    seq = Sequence(
        *(seq_id, tokens, prompt, max_len, stops, policy, trigger),
        priority=priority,
        leaves_remainder=policy % 3 != 1,
    )
    seq.event_kind = kind_of(policy)
    if continues and policy not in CODES and policy not in KEEP_SCORES:
        seq.talk.continues_as = policy
    if trigger.prunes_prompt(prompt):
        seq.num_shareable = 0
    return seq


class Loop:
    """Steps one after the other or, with ``overlaps``, each scheduled before the one in front of it
    has told its tokens."""

    def __init__(self, scheduler: Scheduler, *, overlaps: bool = False) -> None:
        self.scheduler, self.shadow = scheduler, ShadowRunner(scheduler)
        self.overlaps = overlaps
        self.num_guessed = self.num_right = 0
        self._in_flight: list[
            tuple[SchedulerOutput, IntArray, list[IntArray], Confirmed | None]
        ] = []

    def step(self) -> tuple[SchedulerOutput, list[Sequence]]:
        """Schedule a step; what it computes, and who has ended since."""
        finished: list[Sequence] = []
        if self._in_flight and not self.scheduler.may_overlap(self._in_flight[-1][0]):
            finished = self._update(0)
        output = self.scheduler.schedule()
        for earlier, *_ in self._in_flight:
            assert not _observed(earlier) & _observed(output), "its counts are on their way"
        tokens = self.shadow.run(output)
        confirmed = self.scheduler.confirm(output, tokens)
        self._in_flight.append((output, tokens, self.shadow.scores, confirmed))
        if confirmed is not None:
            self.num_guessed += output.drafts.num_guessed if output.drafts else 0
            self.num_right += int(confirmed.counts.sum()) - len(output.sampled)
        return output, finished + self._update(self.overlaps)

    def drain(self, limit: int = 3000) -> list[Sequence]:
        """Run until nobody is left."""
        finished: list[Sequence] = []
        for _ in range(limit):
            if not self.scheduler.has_work:
                return finished + self._update(0)
            finished += self.step()[1]
        raise AssertionError("no end in sight")

    def _update(self, left: int) -> list[Sequence]:
        finished: list[Sequence] = []
        while len(self._in_flight) > left:
            finished += self.scheduler.update(*self._in_flight.pop(0))
        coming = Counter(seq.seq_id for output, *_ in self._in_flight for seq in output.sampled)
        for seq in self.scheduler.running:
            assert self.scheduler.rows.num_unknown[seq.row] == coming[seq.seq_id]
        self.scheduler.check_integrity()
        return finished


def _observed(output: SchedulerOutput) -> set[int]:
    """Sequences that a step observes."""
    return {seq_id for task in output.events.observations for seq_id in task.seq_ids.tolist()}


def assert_all_blocks_come_back(scheduler: Scheduler) -> None:
    assert scheduler.blocks.headroom == scheduler.pool.capacity
    scheduler.blocks.clear_cached()
    assert scheduler.saved.host_pool.num_free == scheduler.saved.host_pool.capacity
    assert scheduler.pool.num_free == scheduler.pool.capacity


def preempt_now_and_then(
    scheduler: Scheduler, rng: np.random.Generator, probability: float
) -> None:
    """Make sequences lose their blocks in steps that would not have needed them."""
    promote = scheduler.rows.promote_ready

    def and_more() -> None:
        promote()
        if scheduler.rows.num_rows > 1 and rng.random() < probability:
            scheduler.departures.preempt()

    scheduler.rows.promote_ready = and_more  # type: ignore[method-assign]


class Oracle:
    """In the place of a row's drafter: guesses that are right more often than not."""

    ask_at = 0

    def __init__(self, shadow: ShadowRunner, rng: np.random.Generator, row: int) -> None:
        self._shadow, self._rng, self._row = shadow, rng, row
        self.share = float(rng.random() < 0.9)

    def look_up(self, token_ids: IntArray, *, verifies: bool) -> list[int]:
        held = {lane: list(entries) for lane, entries in self._shadow.held[self._row].items()}
        guess, token = list[int](), int(token_ids[-1])
        for _ in range(int(self._rng.integers(0, 5))):
            for entries in held.values():
                entries.append(content(entries, token))
            token = self._shadow.next_token(held) if self._rng.random() < 0.8 else 1
            guess.append(token)
        return guess

    def learn(self, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed


class Traffic:
    """Arrivals, forks, aborts and forced preemptions, one operation at a time."""

    def __init__(
        self,
        seed: int,
        policies: set[int] | None = None,
        *,
        overlaps: bool = False,
        continuations: bool = False,
        further: bool = False,
        windows: int = 0,
        newest: int = 0,
        speculation: bool = False,
        clients: int = 1,
    ) -> None:
        """``further``: rows also hold something of every token in a cache group of its own;
        ``windows``: three layers see so many of the newest tokens alone; ``newest``: those from the
        last multiple of so many blocks on are held once more, and the first; ``speculation``:
        rows guess; ``clients``: how many send, with bounds on the rows of one and on the
        prompts of a step."""
        rng = self.rng = np.random.default_rng(seed)
        chunked = bool(rng.integers(2))
        self.budget = 32 if chunked else 128  # without chunks a whole sequence must fit a step
        layout = LAYOUTS[seed % 3]
        self.policies = sorted(policies or policies_of(layout))
        groups: tuple[GroupSpec, ...] = (GroupSpec(layout.block_size),) if further else ()
        more = 0
        if windows or newest:
            spec = WindowSpec(layout.block_size, 3, windows, self.budget)
            if newest:  # blocks of two tokens
                spec = NewestSpec(2, 0, newest * layout.block_size, self.budget)
                groups += (FirstSpec(2),)
            groups += (spec,)
            more = sum(each.blocks_for(layout, 128) for each in groups) // layout.groups // 2
            self.policies = sorted({*self.policies} - {20})  # what it prunes has no windows
        self.scheduler = make_scheduler(
            int(rng.integers(30, 70)) * (1 + 2 * (continuations and seed // 3 % 2)) + more,
            layout,
            chunked_prefill=chunked,
            max_num_batched_tokens=self.budget,
            prefix_caching=bool(seed % 4),
            num_host_blocks=int(rng.choice([0, 15, 80])),
            max_observed_tokens=int(rng.choice([1, 20, 200])),
            continuations=continuations,
            max_continuation_blocks=None if seed % 3 else 80,
            further_groups=groups,
            speculation=NgramSettings(4, 1, 2) if speculation else None,
            max_num_seqs_per_client=None if clients == 1 else 5,
            max_prefill_tokens=None if clients == 1 else 7,
        )
        self.clients = clients
        self.loop = Loop(self.scheduler, overlaps=overlaps)
        self.alive: list[Sequence] = []
        self.finished: list[Sequence] = []
        if self.scheduler.speculation is not None:
            rows = lambda row: Oracle(self.loop.shadow, rng, row)  # noqa: E731
            enough = lambda rows: float(rng.choice([0.5, 2.0]))  # noqa: E731
            self.scheduler.speculation.enough = enough  # type: ignore[method-assign]
            self.scheduler.speculation._drafter = rows  # type: ignore[method-assign, assignment]
        self.continuations = continuations
        self.num_added = self.num_hits = self.num_pruned = 0
        preempt_now_and_then(self.scheduler, rng, 0.01)

    def run(self, operations: int) -> None:
        """``operations`` random ones, then everybody to the end."""
        for _ in range(operations):
            self._operate()
            self.alive = [s for s in self.alive if s.status is not SequenceStatus.FINISHED]
        self.finished += self.loop.drain()
        assert_all_blocks_come_back(self.scheduler)
        assert not self.scheduler.events.scoring, "an event waits for its scores"

    def _operate(self) -> None:
        draw, scheduler = self.rng.random(), self.scheduler
        if draw < 0.12 and len(self.alive) < 40:
            self._add()
        elif draw < 0.15 and self.alive:
            scheduler.finish(self.alive[int(self.rng.integers(len(self.alive)))], "abort")
        else:
            output, finished = self.loop.step()
            assert output.num_tokens <= self.budget
            self.num_hits += int(output.admitted.num_computed.any())
            self.num_pruned += len(output.pruned)
            self.finished += finished
        scheduler.check_integrity()

    def _add(self) -> None:
        """One request: a prompt that may begin like others, in one to three branches."""
        rng, scheduler = self.rng, self.scheduler
        prompt, more = int(rng.integers(1, 30)), int(rng.integers(1, 70))
        policy = int(rng.choice(self.policies))
        first = int(rng.integers(2, 5))
        history = None
        if self.continuations and self.finished and rng.random() < 0.8:
            policy, history = self._history(int(rng.integers(len(self.finished))))
            prompt = min(prompt, 127 - len(history))
            more = min(more, 128 - prompt - len(history))
        for _ in range(int(rng.choice([1, 1, 3]))):
            seq = make_sequence(
                self.num_added,
                prompt,
                more,
                policy,
                first=first,
                priority=int(rng.integers(2)),
                stops=(7, 8, 9) if self.num_added % 3 else (),
                history=history,
                continues=self.continuations,
            )
            if seq.seq_id % 5 and not isinstance(seq.trigger, EngineWide):
                seq.guesses.start = 0
            seq.client = str(self.num_added * 7 % self.clients)
            needed = scheduler.blocks_at_least(seq.num_tokens, seq.max_len, seq.trigger)
            if history is not None and needed > scheduler.pool.capacity:
                return  # a request that is refused
            assert needed <= scheduler.pool.capacity
            scheduler.add(seq)
            self.alive.append(seq)
            self.num_added += 1

    def _history(self, number: int) -> tuple[int, IntArray]:
        """What a sequence that has ended leaves to its next turn: all its tokens, or less."""
        ended = self.finished[number if number % 8 == 0 else -1 - number % 5]
        known = ended.token_ids[: ended.num_tokens - int(self.rng.integers(0, 4))]
        return ended.policy_id, known[:120]
