"""Events that are due by the engine's step count, not by positions of their sequences."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.periodic import EngineWide
from kvserve.scheduler.triggers.trigger import Trigger


class EngineWideDates:
    """Steps since the last event, for each policy with an ``EngineWide`` trigger."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._triggers: dict[int, EngineWide] = {}
        self._steps_since: dict[int, int] = {}

    def register(self, policy_id: int, trigger: Trigger) -> None:
        """Register the trigger of a policy; a new trigger starts to count steps."""
        if self._triggers.get(policy_id) == trigger:
            return
        self._triggers.pop(policy_id, None)
        if isinstance(trigger, EngineWide):
            self._triggers[policy_id], self._steps_since[policy_id] = trigger, 0

    def make_due(self) -> None:
        """Count this step; if a policy's period is over, make its oldest eligible rows due."""
        rows = self._rows
        for policy_id, trigger in self._triggers.items():
            at = np.flatnonzero(rows.policy_id[: rows.num_decoding] == policy_id)
            if not len(at):
                continue
            self._steps_since[policy_id] += 1
            if self._steps_since[policy_id] % trigger.period:
                continue
            at = at[trigger.eligible(rows.state(at))]
            at = at[rows.arrival[at].argsort()][: trigger.most]
            rows.next_event[at] = rows.num_computed[at]
            if len(at):
                self._steps_since[policy_id] = 0
