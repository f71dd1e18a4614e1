"""Events whose kept entries move to the front, or stay in whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.event_parts import EventParts
from kvserve.engine.compression.moves import groups_of
from kvserve.engine.policies.base import Policy
from kvserve.scheduler.messages.event import Events


class EvenEvents:
    """Lengths are known beforehand, so an event is scored as it is carried out."""

    def __init__(self, parts: EventParts, compressor: Compressor) -> None:
        self._batch, self._compressor = parts.batch, compressor

    @property
    def _tables(self) -> tuple[Tensor, Tensor]:
        return self._batch.block_tables, self._batch.log_tables

    def observe(self, events: Events, policy: Policy) -> tuple[Tensor, dict[int, Any]]:
        raise AssertionError("their lengths are known")

    def apply(self, events: Events, policy: Policy, found: Mapping[int, Any]) -> None:
        self._compressor.run(events, policy, *self._tables)


class UnevenEvents(EvenEvents):
    """An event is scored in one step, and carried out in a later one."""

    def observe(self, events: Events, policy: Policy) -> tuple[Tensor, dict[int, Any]]:
        answer, kept = self._compressor.observe(events, policy, *self._tables)
        return groups_of(answer, self._batch.layout), dict(kept)

    def apply(self, events: Events, policy: Policy, found: Mapping[int, Any]) -> None:
        self._compressor.run_observed(events, policy, found, self._tables[0])
