"""What the core counts as it steps: sizes of steps, and compactions by what caused them."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

import numpy as np

from kvserve.engine.policies.base import Policy
from kvserve.outputs import ITERATION_TOKENS, Compaction, CompactionCounts
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.drafts import Confirmed, Drafts
from kvserve.scheduler.messages.output import CompactionTask, SchedulerOutput


class StepCounts:
    """Totals since start, in the form of ``EngineStats``."""

    def __init__(self, layout: KVLayout, policies: Mapping[int, Policy]) -> None:
        self._layout = layout
        self._policies = policies
        self._iterations = [0] * (len(ITERATION_TOKENS) + 1)
        self.num_tokens = self.prompt_tokens = self.generation_tokens = 0
        self.compaction_seconds = 0.0
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self._events: Counter[tuple[str, str]] = Counter()
        self._released: Counter[tuple[str, str]] = Counter()

    @property
    def iterations(self) -> tuple[int, ...]:
        return tuple(self._iterations)

    @property
    def compactions(self) -> tuple[CompactionCounts, ...]:
        return tuple(
            CompactionCounts(*key, events, self._released[key])
            for key, events in self._events.items()
        )

    def add(self, output: SchedulerOutput) -> list[tuple[int, Compaction]]:
        """Count a step; returns its compactions, each with its sequence."""
        self._iterations[bisect_left(ITERATION_TOKENS, output.num_tokens)] += 1
        self.num_tokens += output.num_tokens
        tasks = *output.compactions, *output.pruned
        return [event for task in tasks for event in self._add(task)]

    def add_drafts(self, drafts: Drafts, confirmed: Confirmed) -> None:
        """Count what a step has verified."""
        self.drafts += int(np.count_nonzero(drafts.lengths > 1))
        self.draft_tokens += drafts.num_guessed
        self.accepted_tokens += int(confirmed.counts.sum()) - len(confirmed.counts)

    def _add(self, task: CompactionTask) -> list[tuple[int, Compaction]]:
        reason = "pressure" if task.early else "due"
        key, size = (self._policies[task.policy_id].name, reason), self._layout.block_size
        compacts = task.compacts
        if not compacts.any():
            return []
        self._events[key] += int(compacts.sum())
        blocks = -(-task.old_lens // size) - -(-task.new_lens // size)
        self._released[key] += int(blocks.sum())
        held = -(-task.new_lens.sum(axis=(0, 2)) // self._layout.groups)
        evicted = (task.old_lens - task.new_lens).sum(axis=(0, 2)) // self._layout.groups
        now = time.time()
        each = task.seq_ids[compacts], evicted[compacts], held[compacts]
        return [
            (seq_id, Compaction(reason, now, *counts))
            for seq_id, *counts in zip(*(x.tolist() for x in each), strict=True)
        ]
