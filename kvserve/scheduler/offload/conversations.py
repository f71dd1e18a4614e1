"""Continuations of conversations: saves the rows of sequences that end, and resumes from them.

Its blocks stay in the pool, and any sequence whose prompt begins with a row's tokens may resume
from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.cache_group import ResumeAt
from kvserve.scheduler.blocks.continuation_index import LookedUp
from kvserve.scheduler.messages.continuation import (
    MEMORY,
    NO_PLACE,
    Continuation,
    Resumption,
    SavedRow,
    Turn,
)
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.offload.saved_rows import blocks_to_resume, resume_row, save_row
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.trigger import RowState


@dataclass(frozen=True, slots=True)
class NextTurn:
    """How a sequence resumes: it gets all ``blocks`` up to its target at once, and stops next at
    ``due``. ``hosted`` says where the ``row`` is as the plan is made: by the time that the plan is
    used, the store may have moved or dropped the row.
    """

    resumption: Resumption
    row: SavedRow
    hosted: bool
    due: int
    at: ResumeAt
    blocks: int


class Conversations:
    """Moves rows to the store of continuations and back. A sequence that resumes one takes over
    its history: if it loses its cache, it is computed again with all events and turns of that."""

    def __init__(self, rows: RowTable, blocks: BlockManager) -> None:
        self.store = blocks.continuations
        self._rows, self._blocks = rows, blocks
        self._known: tuple[int, int, LookedUp] = (-1, -1, LookedUp(None, None, ""))

    def save_row(self, seq: Sequence) -> None:
        """Save the row of a sequence that ends now, if it has got past its prompt."""
        rows, row = self._rows, seq.row
        if seq.continues_as is None or not rows.caught_up[row]:
            return
        remainder = NO_PLACE
        if rows.has_remainder(row):
            if not self.store.make_place():
                return
            remainder = self.store.host.save_remainder(row)
        computed, size = int(rows.num_computed[row]), self._blocks.layout.block_size
        tokens = rows.token_ids[row, :computed].copy()
        last = seq.events[-1] if seq.events else 0
        least = max(group.resumes_from(row) for group in self._blocks.groups)
        floor = max(seq.num_prompt_tokens, last, least)
        hashes = [seq.cache_seed, *rows.hashes(seq, tokens, seq.column_hashes)]
        self.store.add(
            Continuation(
                seq.continues_as,
                tokens,
                seq.num_prompt_tokens,
                floor,
                replace(save_row(rows, self._blocks, row), remainder=remainder),
                seq.first_prompt_tokens,
                seq.num_shareable,
                seq.turns,
                tuple(seq.events),
                hashes[floor // size],
                hashes[seq.num_prompt_tokens // size],
            )
        )
        if seq.resumed is not None:
            self.store.supersede(seq.resumed.continuation)

    def find(self, seq: Sequence) -> Resumption | None:
        """What a waiting sequence may resume; after a preemption, only what it had resumed."""
        if seq.continues_as is None or seq.refuses is not None:
            return None
        if seq.resumed is not None or seq.replay_until:
            found = seq.resumed
            return found if found is not None and found.continuation in self.store else None
        return self._look_up(seq).live

    def plan(self, seq: Sequence, found: Resumption) -> NextTurn:
        """How ``seq`` would resume from ``found`` now."""
        known, computed = found
        assert known.row is not None
        dropped, lens = len(known.token_ids) - computed, known.row.kv_lens
        held, saved = -(-int((lens - dropped).sum()) // lens.size), known.row.counters
        prompt, first = int(saved["num_prompt"]), int(saved["first_uncompressed_pos"])
        state = RowState.of(prompt, computed, held, first, self._blocks.layout.block_size)
        turns = seq.turns or (*known.turns, Turn(computed, seq.num_prompt_tokens))
        end = np.array([turns[len(known.turns)].end])
        num_prompt, uncompressed = seq.trigger.next_turn(state, end)
        state = replace(state, num_prompt=num_prompt, first_uncompressed_pos=uncompressed)
        due = seq.trigger.next_event(state)
        due[0] = seq.next_event(computed, int(due[0]), len(known.events))
        target = max(min(seq.num_tokens, int(due[0])), computed)
        log_from = int(seq.trigger.log_from(state, due)[0])
        hosted = known.hosted
        at = ResumeAt(dropped, computed, target, log_from)
        blocks = blocks_to_resume(self._blocks, known.row, hosted, at)
        return NextTurn(found, known.row, hosted, int(due[0]), at, blocks)

    def resume_row(self, seq: Sequence, turn: NextTurn) -> int:
        """Give a sequence a row that resumes as planned; its new turn has not begun there yet."""
        computed = turn.at.computed
        if seq.resumed is None:
            seq.resumed = turn.resumption
            _take_history(seq, turn.resumption)
            self.store.take(turn.resumption)
            self.store.hits_from_host += turn.hosted
        rows, size = self._rows, self._blocks.layout.block_size
        row = rows.resume(seq, turn.row.counters)
        rows.num_computed[row] = seq.num_cached_tokens = computed
        rows.num_published[row] = min(rows.num_published[row], computed // size)
        resume_row(self._blocks, row, turn.row, turn.hosted, turn.at)
        return row

    def recall(self, seq: Sequence) -> None:
        """Let a sequence whose continuation was evicted be computed as that was: with its turns and
        its events, so that it holds no more than the continuation did."""
        if seq.continues_as is None or seq.refuses is not None or seq.replay_until:
            return
        gone = self._look_up(seq).gone
        if gone is not None:
            self.count_miss(seq)
            _take_history(seq, gone)
            seq.replay_until = gone.num_tokens

    def count_miss(self, seq: Sequence) -> None:
        """Count, by its cause, that a sequence resumes nothing, unless it is computed again."""
        if seq.resumed is not None or seq.replay_until:
            return
        if seq.refuses is not None:
            self.store.misses[seq.refuses] += 1
        elif seq.continues_as is not None:
            found = self._look_up(seq)
            self.store.misses[found.cause if found.live is None else MEMORY] += 1

    def _look_up(self, seq: Sequence) -> LookedUp:
        """Look ``seq`` up in the store; keep the answer, since a waiting sequence asks often."""
        asked, changes, found = self._known
        if (asked, changes) != (seq.seq_id, self.store.changes):
            hashes = self._rows.hashes(seq, seq.token_ids, seq.column_hashes)
            keys = [seq.cache_seed, *hashes]
            found = self.store.find(seq.token_ids, keys, seq.continues_as)
            self._known = seq.seq_id, self.store.changes, found
        return found


def _take_history(seq: Sequence, found: Resumption) -> None:
    """Give a sequence the turns and the events of the continuation that it begins with."""
    known, computed = found
    seq.first_prompt_tokens = known.first_prompt_tokens
    seq.turns = *known.turns, Turn(computed, seq.num_prompt_tokens)
    seq.events = list(known.events)
    seq.num_shareable = min(seq.num_shareable, known.num_shareable)
