"""A step's events on one rank: scheduled ones are carried out, then later ones are scored.

What the kinds of events do is in the files that ``scheduler/compression/kinds.py`` names.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.engine.compression.event_parts import DeviceEvents, EventParts
from kvserve.engine.device.transfer import Stopwatch
from kvserve.engine.policies.base import Policy
from kvserve.log import EngineDeadError, SequenceError
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.compression.kinds import KINDS
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import ScheduledEvents
from kvserve.scheduler.triggers.trigger import EventKind

if TYPE_CHECKING:
    from kvserve.engine.compression.compressor import Compressor


class EventRunner:
    """Runs events of all kinds; ``policies`` by ``Events.policy_id``.

    What an event will keep is stored by sequence when it is scored. The event is carried out once
    its counts are on the host: in the next step or, if steps overlap, the one after. What is not
    used by then is dropped, and the event is scored again.
    """

    def __init__(
        self, parts: EventParts, policies: Mapping[int, Policy], *, overlaps: bool
    ) -> None:
        self._parts = parts
        self._policies = policies
        self._scored: deque[dict[int, Any]] = deque(maxlen=2 if overlaps else 1)
        self._kinds: dict[EventKind, Any] = {}

    @cached_property
    def compressor(self) -> Compressor:
        """What scores and moves entries, which nobody needs before the first event."""
        from kvserve.engine.compression.compressor import Compressor

        return Compressor.of(self._parts)

    def _of_kind(self, kind: EventKind) -> Any:
        """The kind's ``DeviceEvents``."""
        if kind not in self._kinds:
            self._kinds[kind] = KINDS[kind].device(self._parts, self.compressor)
        return self._kinds[kind]

    def run(self, scheduled: ScheduledEvents) -> tuple[list[Tensor], Stopwatch | None]:
        """Carry out compactions, then score what later ones will keep: what goes to the host."""
        found = {seq_id: kept for step in self._scored for seq_id, kept in step.items()}
        self._scored.append({})
        if not (scheduled.compactions or scheduled.observations):
            return [], None
        batch, group = self._parts.batch, self._parts.group
        watch = Stopwatch(batch.device)
        for events in scheduled.compactions:
            with _blaming(events.seq_ids):
                kind: DeviceEvents = self._of_kind(events.kind)
                kind.apply(events, self._policies[events.policy_id], found)
                batch.after_compaction(events)
                if group.size > 1:
                    batch.add_to_fingerprint(events.rows, group)
        answers = []
        for events in scheduled.observations:
            with _blaming(events.seq_ids):
                kind = self._of_kind(events.kind)
                answer, scored = kind.observe(events, self._policies[events.policy_id])
                self._scored[-1].update(scored)
                answers.append(answer)
        watch.stop()
        return answers, watch

    def compute_pruned(self, task: Events, *, logs_queries: bool) -> Tensor:
        """Compute a prompt that is pruned between layers; its last hidden state [1, hidden]."""
        policy, kind = self._policies[task.policy_id], self._of_kind(EventKind.PRUNED)
        last: Tensor = kind.compute(task, policy, logs_queries=logs_queries)
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
