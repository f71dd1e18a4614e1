"""One sequence (a prompt and one branch of its continuation) as the scheduler knows it."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.column_hash import SEED
from kvserve.scheduler.triggers.trigger import NO_EVENT, EventKind, Trigger

if TYPE_CHECKING:
    from kvserve.scheduler.messages.continuation import Resumption


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Guessing:
    """How a sequence's next tokens are guessed; ``drafter`` (a ``Drafter``) does it, once anything
    has."""

    start: int = NO_EVENT
    """From how many tokens on the next ones may be guessed, and several verified in a step."""
    refused: str | None = None
    """Why they may not, if the engine guesses at all."""
    drafter: Any = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Conversation:
    """The conversation that a sequence is a turn of."""

    continues_as: Hashable = None
    """A sequence resumes a continuation only if these are equal, besides the tokens. ``None``: it
    leaves no continuation and resumes none."""
    refuses: str | None = None
    """Why it resumes no continuation (one of ``MISSES``), if that is known beforehand."""
    resumed: Resumption | None = None
    """The continuation that it has resumed."""


@dataclass(slots=True)
class Usage:
    """What a sequence held when it last left its row, and what its events had done by then."""

    logical_tokens: int = 0
    held_tokens: int = 0
    held_entries: int = 0
    held_blocks: Counter[str] = field(default_factory=Counter)
    """By what they hold (``CacheGroup.kind``)."""
    held_counts: dict[str, int] = field(default_factory=dict)
    """What cache groups say of its entries (``CacheGroup.counts``)."""
    remainder_entries: int = 0
    compactions: int = 0
    blocks_released: int = 0
    peak_blocks: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """``token_ids`` is current while the sequence waits; a running one keeps its tokens in its row.

    ``max_len`` bounds prompt plus output in tokens; ``sampling`` is carried to the runner unread.
    """

    seq_id: int
    token_ids: IntArray
    num_prompt_tokens: int
    max_len: int
    stop_token_ids: tuple[int, ...]
    policy_id: int
    trigger: Trigger
    event_kind: EventKind = EventKind.EVEN
    """What decides how much its policy's events keep."""
    leaves_remainder: bool = False
    """Something stands for the entries that its events drop."""
    sampling: Any = None
    num_shareable: int = NO_EVENT
    """Leading tokens whose entries depend on the tokens before them alone; only these may be in the
    prefix cache."""
    cache_seed: bytes = SEED
    """Seed of its column hashes: only sequences with equal seeds share cached columns."""
    column_hashes: list[bytes] = field(default_factory=list)
    num_cached_tokens: int = 0
    guesses: Guessing = field(default_factory=Guessing)
    priority: int = 0
    client: str = ""
    """Who sent it: sequences of one client wait for each other."""
    arrival: int = 0
    talk: Conversation = field(default_factory=Conversation)
    events: list[int] = field(default_factory=list)
    """Logical positions of its events so far, those of earlier turns among them."""
    replay_until: int = 0
    """Tokens computed when it lost its cache; up to there recomputation repeats ``events``."""
    awaits_token: bool = False
    """It lost its row while its newest token was being sampled; the token is not known yet."""
    row: int = -1
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: str | None = None
    stop_token: int | None = None
    usage: Usage = field(default_factory=Usage)

    def prunes_from(self, computed: int) -> bool:
        """Whether it computes next all of its prompt, and prunes it meanwhile."""
        return not computed and self.trigger.prunes_prompt(self.num_prompt_tokens)

    @property
    def num_tokens(self) -> int:
        """Known tokens of a waiting sequence (after a preemption the generated ones count too)."""
        return len(self.token_ids)

    def next_event(self, position: int, due: int, done: int = 0) -> int:
        """Where the next event of a row at ``position`` comes, after ``done`` events, if its
        trigger says ``due``.
        """
        # Memory pressure and engine-wide triggers move events: a sequence that is computed again
        # has them where it had them, whatever its trigger would say now.
        if done < len(self.events):
            return self.events[done]
        return max(due, self.replay_until) if position < self.replay_until else due
