"""A step's events on one rank: scheduled ones are carried out, then later ones are scored.

What the kinds of events do to lengths and blocks is in ``scheduler/compression/handlers.py``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvserve.engine.cache.code_rows import CodeRows
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.compression.coder import Coder
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.forwards import PrunedPrefill
from kvserve.engine.compression.moves import groups_of, lanes_of
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import Stopwatch
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.log import EngineDeadError, SequenceError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.triggers.trigger import EventKind


class EventRunner:
    """Runs events of all kinds; ``policies`` by ``Events.policy_id``.

    What an event will keep is stored by sequence when it is scored. The event is carried out once
    its counts are on the host: in the next step or, if steps overlap, the one after. What is not
    used by then is dropped, and the event is scored again.
    """

    def __init__(
        self,
        batch: InputBatch,
        compressor: Compressor,
        prefill: PrunedPrefill,
        policies: Mapping[int, Policy],
        group: RankGroup,
        *,
        overlaps: bool,
    ) -> None:
        self._batch = batch
        self._compressor = compressor
        self._prefill = prefill
        self._policies = policies
        self._group = group
        self._scored: deque[dict[int, Any]] = deque(maxlen=2 if overlaps else 1)
        self._codes = next((rows for rows in batch.groups if isinstance(rows, CodeRows)), None)
        if self._codes is not None:
            self._coder = Coder(self._codes.cache, self._codes.store, compressor)

    def run(self, scheduled: ScheduledEvents) -> tuple[list[Tensor], Stopwatch | None]:
        """Carry out compactions, then score what later ones will keep: what goes to the host."""
        found = {seq_id: kept for step in self._scored for seq_id, kept in step.items()}
        self._scored.append({})
        if not (scheduled.compactions or scheduled.observations):
            return [], None
        watch, batch, compressor = Stopwatch(self._batch.device), self._batch, self._compressor
        tables = batch.block_tables, batch.log_tables
        for events in scheduled.compactions:
            policy = self._policies[events.policy_id]
            with _blaming(events.seq_ids):
                if events.kind is EventKind.EVEN:  # lengths are known beforehand: scored now
                    compressor.run(events, policy, *tables)
                elif events.kind is EventKind.CODED:
                    self._coder.run(events, found)
                else:
                    compressor.run_observed(events, policy, found, tables[0])
                batch.after_compaction(events)
                if self._group.size > 1:
                    batch.add_to_fingerprint(events.rows, self._group)
        answers = []
        for events in scheduled.observations:
            with _blaming(events.seq_ids):
                policy = self._policies[events.policy_id]
                scored: dict[int, Any]
                if events.kind is EventKind.CODED:
                    assert self._codes is not None and isinstance(policy, SpindleKV)
                    coded = self._codes.code_tables(*tables)
                    answer, scored = self._coder.observe(events, policy, coded)
                else:
                    answer, scored = compressor.observe(events, policy, *tables)
                self._scored[-1].update(scored)
                answers.append(groups_of(answer, batch.layout))
        watch.stop()
        return answers, watch

    def compute_pruned(self, task: Events, *, logs_queries: bool) -> Tensor:
        """Compute a prompt that is pruned between layers; its last hidden state [1, hidden]."""
        last, held = self._prefill.run(task, self._policies[task.policy_id], logs_queries)
        self._compressor.tell(task, held, lanes_of(task.new_lens, self._batch.layout))
        return last


class EventMemoryError(torch.OutOfMemoryError):
    """There was no memory for the events of these sequences: the newest one is to be ended."""

    def __init__(self, message: str, seq_ids: Iterable[int]) -> None:
        super().__init__(message)
        self.seq_ids = frozenset(seq_ids)


@contextmanager
def _blaming(seq_ids: IntArray) -> Iterator[None]:
    """Turn an error inside the block into one that names these sequences."""
    try:
        yield
    except EngineDeadError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise EventMemoryError(str(error), seq_ids.tolist()) from error
    except Exception as error:
        raise SequenceError(f"{type(error).__name__}: {error}", seq_ids.tolist()) from error
