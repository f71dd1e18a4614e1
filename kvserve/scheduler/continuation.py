"""What a row was when its sequence ended, for the next turn of its conversation to go on from."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvserve.scheduler.block_pool import IntArray

NEW, TOKENS, POLICY, EVICTED = "new", "tokens", "policy", "evicted"
REFUSED, UNSUPPORTED, MEMORY = "refused", "unsupported", "memory"
MISSES = (NEW, TOKENS, POLICY, EVICTED, REFUSED, UNSUPPORTED, MEMORY)
"""Why a sequence takes no continuation. ``NEW``: none begins like it. ``TOKENS``: one does, but
what was generated reads otherwise in the prompt. ``POLICY``: one would, under another policy.
``EVICTED``: one did, and has made room. ``REFUSED``: its request says so. ``UNSUPPORTED``: its
policy or its request cannot. ``MEMORY``: there was no room to go on."""


class Turn(NamedTuple):
    """A turn behind the first: it goes on from position ``start``, its prompt ends at ``end``."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A row of a table: columns ``[first, end)`` ``[LG, R]``, whose blocks ``[LG, R, .]`` begin
    with column ``start``."""

    first: IntArray
    end: IntArray
    start: int
    blocks: IntArray

    @property
    def named(self) -> IntArray:
        """Every block, once per naming."""
        column = self.start + np.arange(self.blocks.shape[2])
        live = (column >= self.first[..., None]) & (column < self.end[..., None])
        return self.blocks[live]


@dataclass(frozen=True, slots=True)
class SavedRow:
    """Tables of keys and values and of logged queries, and what ``park_row`` said of lengths."""

    kv: SavedTable
    log: SavedTable
    lengths: dict[str, IntArray]

    @property
    def named(self) -> IntArray:
        """Every block, once per naming."""
        return np.concatenate([self.kv.named, self.log.named])


@dataclass(slots=True, eq=False)
class Continuation:
    """What a sequence held of its ``token_ids`` when it ended; ``row`` is gone once it made room.

    ``shared_by`` is what others must agree in beside tokens. Since ``floor`` tokens nothing but
    tokens has come, so it serves whoever begins with so many of them, or more. Its last prompt had
    ``num_prompt`` of them. The rest is the sequence's: ``counters`` of its row, ``events``,
    ``turns``, and the first prompt's length.
    """

    shared_by: Hashable
    token_ids: IntArray
    num_prompt: int
    floor: int
    counters: dict[str, IntArray]
    row: SavedRow | None
    first_prompt_tokens: int
    prunes_prompt: bool
    num_shareable: int
    turns: tuple[Turn, ...]
    events: tuple[int, ...]
    keys: tuple[bytes, ...]
    """Hashes of the columns before ``floor`` and before ``num_prompt``: where it is looked up."""
    used: int = 0
    taken: int = field(default=0)
    """How many sequences have gone on from it."""


class Resumption(NamedTuple):
    """A sequence goes on from the first ``num_tokens`` of a continuation."""

    continuation: Continuation
    num_tokens: int
