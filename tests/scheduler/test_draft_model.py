"""A draft model, seen from the scheduler: whose tokens it reads, and when it is let alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvserve.scheduler.blocks.draft_group import DraftGroup, DraftSpec
from kvserve.scheduler.messages.output import NewRequest, SchedulerOutput
from kvserve.scheduler.speculation.draft_costs import NEVER
from kvserve.scheduler.speculation.draft_model import DraftModelSettings, DraftModelSpeculation
from kvserve.scheduler.step.scheduler import Scheduler
from tests.scheduler.traffic import make_scheduler, make_sequence


class Engine:
    """Steps in which every guess is wrong, or right."""

    def __init__(self, *, right: bool = False, tokens: int = 3, **settings: Any) -> None:
        defaults: dict[str, Any] = {"num_blocks": 400, "max_num_batched_tokens": 64}
        self.scheduler: Scheduler = make_scheduler(
            **{**defaults, **settings},
            further_groups=(DraftSpec(4, 1, 1),),
            speculation=DraftModelSettings(tokens),
        )
        self.right = right
        speculation = self.scheduler.speculation
        assert isinstance(speculation, DraftModelSpeculation)
        self.speculation = speculation
        group = self.scheduler.blocks.find(DraftGroup)
        assert group is not None
        self.group = group

    def add(self, seq_id: int, prompt: int, output: int = 60) -> None:
        seq = make_sequence(seq_id, prompt, output, 0, first=2 + 3 * seq_id)
        seq.guess_from = 0
        self.scheduler.add(seq)

    def step(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        if output.draft_chunks is not None and output.drafts is not None:
            guesses = np.full(output.drafts.num_guessed, 5 if self.right else 6, np.int32)
            output = output.with_guesses(guesses)
        sampled = np.full(len(output.sampled_rows), 5, np.int32)
        confirmed = self.scheduler.confirm(output, sampled)
        self.scheduler.update(output, sampled, (), confirmed)
        self.scheduler.check_integrity()
        return output


def always(engine: Engine) -> None:
    engine.speculation.costs.least_chance = lambda rows, **_: 0.0  # type: ignore[method-assign]


def test_it_reads_the_prompt_then_what_is_confirmed() -> None:
    for right, expected in ((False, [1, 1, 1]), (True, [2, 2, 2])):
        engine = Engine(right=right)
        always(engine)
        engine.add(0, 20)
        engine.step()
        read, lens = [], []
        for _ in range(4):
            chunks = engine.step().draft_chunks
            assert chunks is not None and chunks.guesses.tolist() == [3]
            read.append(int(chunks.lengths[0]))
            lens.append(int(engine.group.lens[0]))
        assert read == [21, *expected], "the last guess has no entry: it is read if it was right"
        # The newest token has no entry, nor has a right guess that nothing was guessed behind.
        tokens = int(engine.scheduler.rows.num_tokens[0])
        assert lens[-1] == tokens - expected[0]


def test_who_lacks_least_is_first() -> None:
    """A long prompt is read in chunks, and the others go on guessing beside it."""
    engine = Engine(right=True, max_num_batched_tokens=24)
    always(engine)
    engine.add(0, 8)
    for _ in range(3):
        engine.step()
    engine.add(1, 60)
    seen = []
    for _ in range(8):
        chunks = engine.step().draft_chunks
        assert chunks is not None and len(chunks.token_ids) <= 24
        assert chunks.guesses[0] > 0, "it waits for nobody's prompt"
        others = zip(chunks.lengths[1:].tolist(), chunks.guesses[1:].tolist(), strict=True)
        seen += list(others)
    assert [k for _, k in seen[:2]] == [0, 0] and seen[-1][1] > 0
    assert sum(n for n, k in seen if k == 0 or n > 4) >= 60


def test_its_entries_go_before_anybody_waits() -> None:
    """Without blocks for the next prompt they are given back, and nothing is guessed meanwhile."""
    engine = Engine(right=False, num_blocks=24, num_host_blocks=0)
    always(engine)
    engine.add(0, 24, 30)
    for _ in range(3):
        engine.step()
    held = engine.group.held(1)[0]
    assert held >= 6 and engine.scheduler.pool.num_free < 16
    engine.add(1, 40, 20)
    admitted: list[NewRequest] = []
    for _ in range(4):
        output = engine.step()
        admitted += output.admitted.requests
        if not engine.group.held(1)[0]:
            assert output.drafts is None
    assert [request.seq_id for request in admitted] == [1]
    assert engine.scheduler.num_preemptions == 0


def test_it_reads_what_the_credit_allows() -> None:
    """An eighth of what is generated while it is not known to pay; as much as that if it does."""
    engine = Engine()
    speculation = engine.speculation
    behind = np.array([30, 2, 90, 60], np.int32)
    for credit, price, expected in (
        (0, 8, [False, True, False, False]),
        (8 * 30, 8, [True, True, False, False]),
        (8 * 90, 8, [True, True, False, True]),
        (90, 1, [True, True, False, True]),
        (180, 1, [True] * 4),
    ):
        speculation._credit = credit
        assert speculation._affords(behind, price).tolist() == expected


def test_a_trial_after_many_steps_without() -> None:
    """Where it has not paid it is tried again, by few tokens of rows that lack few."""
    engine = Engine()
    costs, speculation = engine.speculation.costs, engine.speculation
    for _ in range(10):
        costs.record(1, 3, 1, 1.0)
        costs.record(1, 0, 1, 0.01)
    assert costs.least_chance(1) == NEVER and not costs.tries_again(1)
    engine.add(0, 20, 100)
    speculation._credit = 0
    for _ in range(5):
        assert engine.step().draft_chunks is None
    for _ in range(130):
        costs.record(1, 0, 1, 0.01)
    assert not costs.tries_again(1), "plain steps have not made up yet for those with guesses"
    for _ in range(7_000):
        costs.record(1, 0, 1, 0.01)
    assert costs.tries_again(1)
    while costs.rests(1):
        assert engine.step().draft_chunks is None
    assert engine.step().draft_chunks is None, "there is no credit yet to read the prompt"
    speculation._credit = 8 * 200
    chunks = engine.step().draft_chunks
    assert chunks is not None and len(chunks.token_ids) > 20
    assert speculation._credit < 8 * 200 - 8 * 20 + 10
