"""Rows that later turns of a conversation resume from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvserve.scheduler.blocks.cache_group import ResumeAt
from kvserve.scheduler.blocks.continuation_index import LookedUp
from kvserve.scheduler.messages.continuation import MEMORY, MISSES, Continuation, Resumption
from kvserve.scheduler.messages.saved_row import SavedRow
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.saved_rows import SavedRows
from kvserve.scheduler.triggers.trigger import RowState


@dataclass(frozen=True, slots=True)
class NextTurn:
    """How a sequence resumes: it gets all ``blocks`` up to its target at once, and stops next at
    ``due``. ``num_prompt`` and ``first_uncompressed_pos`` are its row's from then on. ``hosted``
    says where the ``row`` is as the plan is made: by the time that the plan is used, the store may
    have moved or dropped the row.
    """

    resumption: Resumption
    row: SavedRow
    hosted: bool
    num_prompt: int
    first_uncompressed_pos: int
    due: int
    at: ResumeAt
    blocks: int


class ContinuedRows(SavedRows):
    """Rows of sequences that end go to the ``store``, and later turns resume from them. A sequence
    that loses its row, and whose continuation is gone too, begins anew: its prompt is computed as
    if it had never resumed."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.misses.update(dict.fromkeys(MISSES, 0))
        self._known: tuple[int, int, LookedUp] | None = None

    def save_row(self, seq: Sequence) -> None:
        """Save the row of a sequence that ends now, if it has got past its prompt."""
        rows, row = self._rows, seq.row
        if seq.talk.continues_as is None or not rows.caught_up[row]:
            return
        if rows.has_remainder(row) and not self.store.make_place():
            return
        computed, size = int(rows.num_computed[row]), self._blocks.layout.block_size
        tokens = rows.token_ids[row, :computed].copy()
        last = seq.events[-1] if seq.events else 0
        least = max(group.resumes_from(row) for group in self._blocks.groups)
        floor = max(seq.num_prompt_tokens, last, least)
        hashes = [seq.cache_seed, *rows.hashes(seq, tokens, seq.column_hashes)]
        self.store.add(
            Continuation(
                seq.talk.continues_as,
                tokens,
                seq.num_prompt_tokens,
                floor,
                self._with_remainder(self._save(row), row),
                seq.num_shareable,
                tuple(seq.events),
                hashes[floor // size],
                hashes[seq.num_prompt_tokens // size],
            )
        )
        if seq.talk.resumed is not None:
            self.store.supersede(seq.talk.resumed.continuation)

    def find(self, seq: Sequence) -> Resumption | None:
        """What a waiting sequence may resume; after a preemption, only what it had resumed. If that
        is gone, the sequence forgets it, and the events that came on top of it."""
        if seq.talk.continues_as is None or seq.talk.refuses is not None:
            return None
        if (found := seq.talk.resumed) is not None:
            if found.continuation in self.store:
                return found
            seq.talk.resumed, seq.events, seq.replay_until = None, [], 0
        return None if seq.replay_until else self._look_up(seq).live

    def plan(self, seq: Sequence, found: Resumption) -> NextTurn:
        """How ``seq`` would resume from ``found`` now."""
        known, computed = found
        assert known.row is not None
        dropped, lens = len(known.token_ids) - computed, known.row.kv_lens
        held, saved = -(-int((lens - dropped).sum()) // lens.size), known.row.counters
        prompt, first = int(saved["num_prompt"]), int(saved["first_uncompressed_pos"])
        state = RowState.of(prompt, computed, held, first, self._blocks.layout.block_size)
        num_prompt, uncompressed = seq.trigger.next_turn(state, np.array([seq.num_prompt_tokens]))
        state = replace(state, num_prompt=num_prompt, first_uncompressed_pos=uncompressed)
        due = seq.trigger.next_event(state)
        due[0] = seq.next_event(computed, int(due[0]), len(known.events))
        target = max(min(seq.num_tokens, int(due[0])), computed)
        log_from = int(seq.trigger.log_from(state, due)[0])
        hosted = known.hosted
        at = ResumeAt(dropped, computed, target, log_from, seq.trigger.log_stride)
        blocks = self._blocks_to_resume(known.row, hosted, at)
        begun = int(num_prompt[0]), int(uncompressed[0])
        return NextTurn(found, known.row, hosted, *begun, int(due[0]), at, blocks)

    def resume_row(self, seq: Sequence, turn: NextTurn) -> int:
        """Give a sequence a row that resumes as planned."""
        computed = turn.at.computed
        if seq.talk.resumed is None:
            seq.talk.resumed = turn.resumption
            known = turn.resumption.continuation
            seq.events = list(known.events)
            seq.num_shareable = min(seq.num_shareable, known.num_shareable)
            self.store.take(turn.resumption)
            self._totals.resumed_total += 1
            self._totals.resumed_from_host_total += turn.hosted
            self._totals.resumed_tokens_total += turn.resumption.num_tokens
        rows, size = self._rows, self._blocks.layout.block_size
        row = rows.resume(seq, turn.row.counters)
        rows.num_computed[row] = seq.num_cached_tokens = computed
        rows.num_prompt[row] = turn.num_prompt
        rows.first_uncompressed_pos[row] = turn.first_uncompressed_pos
        rows.num_published[row] = min(rows.num_published[row], computed // size)
        self._resume(row, turn.row, turn.hosted, turn.at)
        return row

    def count_miss(self, seq: Sequence) -> None:
        """Count, by its cause, that a sequence resumes nothing, unless it is computed again."""
        if seq.talk.resumed is not None or seq.replay_until:
            return
        if seq.talk.refuses is not None:
            self.misses[seq.talk.refuses] += 1
        elif seq.talk.continues_as is not None:
            found = self._look_up(seq)
            self.misses[found.cause if found.live is None else MEMORY] += 1

    def _look_up(self, seq: Sequence) -> LookedUp:
        """Look ``seq`` up in the store; keep the answer, since a waiting sequence asks often."""
        known = self._known
        if known is None or known[:2] != (seq.seq_id, self.store.changes):
            hashes = self._rows.hashes(seq, seq.token_ids, seq.column_hashes)
            keys = [seq.cache_seed, *hashes]
            found = self.store.index.longest(seq.token_ids, keys, seq.talk.continues_as)
            known = self._known = seq.seq_id, self.store.changes, found
        return known[2]
