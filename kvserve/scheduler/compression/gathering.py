"""Events that wait a few steps for others, so that one step has them all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.rows.row_table import RowTable

_MOST = 8
"""Steps that an event waits at most."""
_PART = 8
"""Nor does it wait longer than this part of the tokens since the last one."""
_WORTH = 0.5
"""Steps of all decoding rows that one step with events less is taken to be worth."""


class Gathering:
    """Says which due events wait.

    A step with events costs something whatever their number. So decoding rows that are due wait for
    rows of the same policy that are due soon, if that costs few tokens: k rows that wait for w
    steps lose k * w of them. They do so once, and also have the later events together with those
    that they have waited for. No answer depends on it, since an event takes the same entries
    whenever it runs.
    """

    def __init__(self, rows: RowTable) -> None:
        self.row_steps = 0
        """Tokens that rows did not get because their events waited."""
        self._rows = rows
        self._waited: dict[int, int] = {}
        """Steps, by policy, that the events which wait now have waited."""

    def __bool__(self) -> bool:
        """Whether any event waits in this step."""
        return bool(self._waited)

    def ready(self, due: IntArray, has_room: Callable[[int, IntArray], bool]) -> IntArray:
        """Those of the rows ``due [n]``, n > 0, that have their events in this step. Whether a step
        ``has_room`` for another event of a policy beside those of some rows."""
        rows, before, self._waited = self._rows, self._waited, {}
        decoding = rows.decoding_next()
        ready = []
        for policy in np.unique(rows.policy_id[due]).tolist():
            at = due[rows.policy_id[due] == policy]
            caught_up = rows.caught_up[at] == 1
            steps = before.get(policy, 0)
            waits = self._waits(at[caught_up], policy, decoding, steps)
            if waits and has_room(policy, at):
                self._waited[policy] = steps + 1
                self.row_steps += int(np.count_nonzero(caught_up))
                at = at[~caught_up]
            ready.append(at)
        return np.sort(np.concatenate(ready))

    def run_now(self) -> None:
        """No event waits in this step."""
        self._waited = {}

    def _waits(self, at: IntArray, policy: int, decoding: IntArray, waited: int) -> bool:
        """Whether the events of rows ``at`` wait for one of the rows that are ``decoding``."""
        rows = self._rows
        others = decoding[rows.policy_id[decoding] == policy]
        others = others[rows.next_event[others] < rows.max_len[others] - 1]  # the others end first
        if not len(at) or not len(others):
            return False
        first = int((rows.next_event[others] - rows.num_computed[others]).min())
        since = int((rows.num_computed[at] - rows.first_uncompressed_pos[at]).min())
        # The rest of the output is unknown: assume as many tokens as are generated so far.
        generated = rows.num_tokens[at] - rows.num_prompt[at]
        left = int(np.minimum(rows.max_len[at] - rows.num_tokens[at], generated).min())
        worth = _WORTH * (len(at) + len(decoding)) * (1 + left // max(since, 1))
        most = min(_MOST, since // _PART) - waited
        return first <= min(most, worth / len(at))
