"""One sequence (a prompt and one branch of its continuation) as the scheduler knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from kvserve.scheduler.block_pool import IntArray
from kvserve.scheduler.trigger import NO_EVENT, Trigger


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """``token_ids`` is current while the sequence waits; a running one keeps its tokens in its row.

    ``max_len`` bounds prompt plus output in tokens; ``sampling`` is carried to the runner unread.
    The counts at the end are those of the cache the sequence held when it last left its row.
    """

    seq_id: int
    token_ids: IntArray
    num_prompt_tokens: int
    max_len: int
    stop_token_ids: tuple[int, ...]
    policy_id: int
    trigger: Trigger
    sampling: Any = None
    num_shareable: int = NO_EVENT
    """Leading tokens whose entries depend on the tokens before them alone; a prefix cache may hold
    no others."""
    column_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    engine_events: list[int] = field(default_factory=list)
    """Positions at which an ``EngineWide`` trigger took it; a recomputation replays them."""
    arrival: int = 0
    row: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    stop_token: int | None = None
    logical_tokens: int = 0
    held_tokens: int = 0
    held_entries: int = 0
    compactions: int = 0
    blocks_released: int = 0
    peak_blocks: int = 0

    @property
    def num_tokens(self) -> int:
        """Known tokens of a waiting sequence (after a preemption the generated ones count too)."""
        return len(self.token_ids)
