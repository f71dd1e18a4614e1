"""States beside the pool: a row's is of all that it has read, however it came by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.kept_states import KeptStates, StateMove
from kvserve.scheduler.blocks.state_group import BOUNDARY, StateSpec
from kvserve.scheduler.layout import LayerState
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.saved_row import NO_PLACE
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.step.scheduler import Scheduler
from tests.scheduler.shadow import ShadowRunner, content
from tests.scheduler.traffic import (
    Loop,
    assert_all_blocks_come_back,
    make_scheduler,
    make_sequence,
    preempt_now_and_then,
)
from tests.thinning import slow

ROWS, KEPT = 6, 5
SPEC = StateSpec(1, (LayerState(0, (4, 3), (2, 2)),), 64, ROWS, KEPT, 2 * BOUNDARY, host_blocks=3)


class StateRunner(ShadowRunner):
    """A state is a chain of the contents of all entries that its row has computed."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.states = [0] * (ROWS + KEPT)
        """As the messages move them: by row, then by place."""
        self.wanted = [0] * ROWS
        self.away: dict[int, tuple[int, int]] = {}
        self.num_loaded = self.most_saved = 0

    def run(self, output: SchedulerOutput) -> IntArray:
        for a, b in output.row_swaps:
            for of in (self.states, self.wanted):
                of[a], of[b] = of[b], of[a]
        outs = () if output.moves is None else output.moves.outs
        saved = {move.state: self.states[move.row] for move in outs if isinstance(move, StateMove)}
        self.most_saved = max(self.most_saved, len(saved))
        for place, state in saved.items():
            self.states[place] = state
        for move in outs:
            if move.place != NO_PLACE:
                at = move.host_blocks[move.device_blocks == 0]
                assert len(at) == SPEC.host_blocks
                self.away[move.place] = self.states[move.row], self.wanted[move.row]
        for new in output.admitted.requests:
            self.states[new.row] = self.wanted[new.row] = 0
        return super().run(output)

    def _admit(self, output: SchedulerOutput) -> None:
        super()._admit(output)
        for i, new in enumerate(output.admitted.requests):
            held = self.held[new.row][self.lanes[0]]
            for entry in held[: output.admitted.num_computed[i]]:
                self.wanted[new.row] = content([self.wanted[new.row]], entry)
        for move in () if output.moves is None else output.moves.ins:
            if isinstance(move, StateMove):
                self.states[move.row] = self.states[move.state]
                self.num_loaded += 1
            elif move.place != NO_PLACE:
                self.states[move.row], self.wanted[move.row] = self.away.pop(move.place)

    def _store(self, row: int, tokens: list[int], stored: Any = None) -> None:
        for token in tokens:
            super()._store(row, [token], stored)
            entry = self.held[row][self.lanes[0]][-1]
            for of in (self.states, self.wanted):
                of[row] = content([of[row]], entry)

    def check(self) -> None:
        super().check()
        rows = self.scheduler.rows.num_rows
        assert self.states[:rows] == self.wanted[:rows], "a state of other tokens"


def make(spec: StateSpec = SPEC, *, overlaps: bool = False, **settings: Any) -> Loop:
    sizes = {"max_num_seqs": ROWS, "max_model_len": 420, "max_num_batched_tokens": 200}
    scheduler = make_scheduler(further_groups=(spec,), **{**sizes, "num_blocks": 400, **settings})
    loop = Loop(scheduler, overlaps=overlaps)
    loop.shadow = StateRunner(scheduler)
    return loop


def serve(loop: Loop, prompt: int, first: int = 2, *, at: int = 0, policy: int = 0) -> Sequence:
    """A sequence that has ended."""
    seq = make_sequence(at, prompt, 4, policy, first=first)
    loop.scheduler.add(seq)
    loop.drain()
    return seq


def test_prompts_begin_at_the_newest_kept_state() -> None:
    loop = make()
    prompts = [300, 300, 250, 257, 258, 400]
    found = [serve(loop, n, at=i).num_cached_tokens for i, n in enumerate(prompts)]
    # Kept by the first: at 128, 256 and its last multiple of 64, which is 256. The fourth would
    # have one token left behind 256. The third leaves 192: its last one.
    assert found == [0, 256, 128, 192, 256, 256]
    shadow = loop.shadow
    assert isinstance(shadow, StateRunner) and shadow.num_loaded == 5
    assert loop.scheduler.totals.kept_state_bytes == 4 * SPEC.row_bytes  # and the last one's 384


def test_where_prompts_part_a_state_is_kept() -> None:
    """The second computes from 0 on, and leaves a state for the third."""
    loop = make(StateSpec(*(1, SPEC.layers, 64, ROWS, KEPT), every=4 * BOUNDARY))
    shared = np.arange(90, dtype=np.int32)
    found = []
    for i in range(3):
        seq = make_sequence(i, 40, 4, 0, first=100 * (i + 1), history=shared)
        loop.scheduler.add(seq)
        loop.drain()
        found.append(seq.num_cached_tokens)
    assert found == [0, 0, 64]


def test_states_go_with_their_columns_and_the_least_recently_used_first() -> None:
    loop = make()
    for i in range(3):
        serve(loop, 150, first=2 + i, at=i)  # each keeps the state at 128
    kept = loop.scheduler.blocks.prefix_cache
    assert isinstance(kept, KeptStates)
    assert serve(loop, 150, at=3).num_cached_tokens == 128
    for i in range(3):  # three more find two places that nobody has, then the second's
        serve(loop, 150, first=10 + i, at=4 + i)
    firsts = [2, 3, 4, 10, 11, 12]
    hits = [serve(loop, 150, first=n, at=20 + i).num_cached_tokens for i, n in enumerate(firsts)]
    assert hits[:1] == [128] and hits[1] == 0
    loop.scheduler.blocks.clear_cached()
    assert not loop.scheduler.totals.kept_state_bytes
    loop.scheduler.check_integrity()
    assert serve(loop, 150, at=40).num_cached_tokens == 0


def test_events_in_a_prompt_leave_no_state() -> None:
    """Policy 10 evicts within the prompt: what comes behind depends on it."""
    loop = make()
    assert [serve(loop, 200, at=i, policy=10).num_cached_tokens for i in range(2)] == [0, 0]
    assert not loop.scheduler.totals.kept_state_bytes
    # Policy 5 evicts behind it.
    assert [serve(loop, 200, at=2 + i, policy=5).num_cached_tokens for i in range(2)] == [0, 192]


def test_a_step_saves_several_at_once() -> None:
    loop = make()
    for i in range(3):
        loop.scheduler.add(make_sequence(i, 66, 4, 0, first=10 * i))
    loop.drain()
    assert isinstance(loop.shadow, StateRunner) and loop.shadow.most_saved == 3


@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 8))])
def test_random_traffic(seed: int) -> None:
    """Shared prompts, turns, aborts, preemptions and swaps over few blocks and fewer places."""
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = {"num_blocks": 260, "num_host_blocks": 200 * (seed % 2)}
    sizes["max_num_batched_tokens"] = int(rng.choice([32, 150]))
    loop = make(SPEC, overlaps=seed % 3 == 0, **sizes)
    scheduler, alive, ended = loop.scheduler, list[Sequence](), list[Sequence]()
    preempt_now_and_then(scheduler, rng, 0.03)
    for at in range(30):
        prompt, history = int(rng.integers(1, 260)), None
        if ended and rng.random() < 0.4:  # the next turn
            history = ended[int(rng.integers(len(ended)))].token_ids[:300]
            prompt = int(rng.integers(1, 60))
        policy, first = int(rng.choice([0, 0, 1, 5, 7, 10])), int(rng.integers(2, 5))
        seq = make_sequence(at, prompt, 30, policy, first=first, history=history)
        scheduler.add(seq)
        alive.append(seq)
        for _ in range(int(rng.integers(0, 16))):
            ended += loop.step()[1]
        if rng.random() < 0.2:
            scheduler.finish(alive[int(rng.integers(len(alive)))], "abort")
            scheduler.check_integrity()
        alive = [seq for seq in alive if seq.status is not SequenceStatus.FINISHED]
    loop.drain()
    assert isinstance(loop.shadow, StateRunner)
    assert loop.shadow.num_loaded > 5 and scheduler.totals.preemptions_total
    assert bool(scheduler.totals.swaps_total) == bool(seed % 2)
    assert_all_blocks_come_back(scheduler)
    scheduler.check_integrity()
