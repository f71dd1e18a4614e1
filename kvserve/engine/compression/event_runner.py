"""A step's events on one rank: scheduled ones are carried out, then later ones are scored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from kvserve.engine.cache.code_rows import CodeRows
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.handlers import (
    DeviceBlockEvents,
    DeviceCodedEvents,
    DeviceEvenEvents,
    DevicePrunedEvents,
    DeviceUnevenEvents,
)
from kvserve.engine.compression.pruned_prefill import PrunedPrefill
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import Stopwatch
from kvserve.engine.policies.base import Policy
from kvserve.log import EngineDeadError, SequenceError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import EventKind
from kvserve.scheduler.messages.output import CompactionTask, SchedulerOutput

ScoredEvents = list[tuple[EventKind, Tensor]]
"""For each of ``SchedulerOutput.observations``, its kind and what goes to the host."""


class EventRunner:
    """One handler per kind of event; ``policies`` by ``CompactionTask.policy_id``."""

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
        self._policies = policies
        self._group = group
        self._pruned = DevicePrunedEvents(compressor, batch, prefill, overlaps=overlaps)
        self._handlers: dict[EventKind, DeviceEvenEvents] = {
            EventKind.EVEN: DeviceEvenEvents(compressor, batch),
            EventKind.UNEVEN: DeviceUnevenEvents(compressor, batch, overlaps=overlaps),
            EventKind.BLOCKS: DeviceBlockEvents(compressor, batch, overlaps=overlaps),
            EventKind.PRUNED: self._pruned,
        }
        for rows in batch.groups:
            if isinstance(rows, CodeRows):
                coded = DeviceCodedEvents(compressor, batch, rows, overlaps=overlaps)
                self._handlers[EventKind.CODED] = coded

    def run(self, output: SchedulerOutput) -> tuple[ScoredEvents, Stopwatch | None]:
        """Carry out compactions, then score what later ones will keep."""
        for handler in self._handlers.values():
            handler.begin_step()
        if not (output.compactions or output.observations):
            return [], None
        watch = Stopwatch(self._batch.device)
        for task in output.compactions:
            with _blaming(task.seq_ids):
                self._handlers[task.kind].apply(task, self._policies[task.policy_id])
                self._batch.after_compaction(task)
                self._batch.add_to_fingerprint(task.rows, self._group)
        scored: ScoredEvents = []
        for events in output.observations:
            with _blaming(events.seq_ids):
                policy = self._policies[events.policy_id]
                scored.append((events.kind, self._handlers[events.kind].score(events, policy)))
        watch.stop()
        return scored, watch

    def compute_pruned(self, task: CompactionTask, *, logs_queries: bool) -> Tensor:
        """Compute a prompt that is pruned between layers; its last hidden state [1, hidden]."""
        policy = self._policies[task.policy_id]
        return self._pruned.compute(task, policy, logs_queries=logs_queries)


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
