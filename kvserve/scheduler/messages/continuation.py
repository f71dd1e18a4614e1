"""The state of a row when its sequence ended, from which the next turn may resume."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.saved_row import SavedRow

NEW, TOKENS, POLICY, EVICTED = "new", "tokens", "policy", "evicted"
REFUSED, UNSUPPORTED, MEMORY = "refused", "unsupported", "memory"
MISSES = (NEW, TOKENS, POLICY, EVICTED, REFUSED, UNSUPPORTED, MEMORY)
"""Why a sequence resumes no continuation. ``NEW``: none begins like it. ``TOKENS``: the prompt of
one does, but the tokens generated after it differ. ``POLICY``: one fits, but has another policy.
``EVICTED``: one fitted, but is evicted. ``REFUSED``: the request says so. ``UNSUPPORTED``: the
policy or the request cannot resume. ``MEMORY``: there was no room to resume."""


@dataclass(slots=True, eq=False)
class Continuation:
    """What a sequence held of its ``token_ids`` when it ended; ``row`` is ``None`` once evicted.

    A sequence that resumes it must have the same ``shared_by``, and begin with at least ``floor``
    of its tokens: after those no event and no prompt came. Its last prompt ended at ``num_prompt``.
    ``events`` and ``num_shareable`` are the sequence's.
    """

    shared_by: Hashable
    token_ids: IntArray
    num_prompt: int
    floor: int
    row: SavedRow | None
    num_shareable: int
    events: tuple[int, ...]
    floor_key: bytes
    """The hash of the full columns before ``floor``, and below before ``num_prompt``."""
    prompt_key: bytes
    hosted: bool = False
    """Whether ``row`` is in host memory; its tables then name host blocks."""
    used: int = 0
    taken: int = 0
    """How many sequences have resumed it."""


class Resumption(NamedTuple):
    """A sequence resumes the first ``num_tokens`` of a continuation."""

    continuation: Continuation
    num_tokens: int
