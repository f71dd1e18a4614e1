"""Rows that are saved and resumed: by later turns of a conversation, or after a preemption.

A compressed sequence that is preempted goes to host memory and comes back unchanged. Recomputing it
would first rebuild the larger cache that its events had cut down, and replay them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.cache_group import ResumeAt
from kvserve.scheduler.messages.continuation import MEMORY, Continuation, Resumption, SavedRow, Turn
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.triggers.trigger import RowState
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.blocks.continuation_index import LookedUp


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


class SavedRows:
    """Rows that are away. Preempted ones are parked in host memory, where they come before
    continuations. Those of sequences that end go to the ``store`` of continuations, and later turns
    resume from them. A sequence that does takes over the continuation's history: if it loses its
    cache, it is computed again with all events and turns of that."""

    def __init__(self, rows: RowTable, blocks: BlockManager, totals: EngineStats) -> None:
        self._totals = totals
        self.misses: Counter[str] = Counter()
        """Why sequences resumed nothing."""
        self.store = blocks.continuations
        self._rows, self._blocks, self._memory = rows, blocks, self.store.host
        self.host_pool = self._memory.pool
        self._parked: dict[int, SavedRow] = {}
        self._known: tuple[int, int, LookedUp] | None = None

    # ---- preempted rows ----------------------------------------------------------------------

    def __contains__(self, seq: Sequence) -> bool:
        return seq.seq_id in self._parked

    def park(self, seq: Sequence) -> bool:
        """Copy a row's blocks to host memory, if there is room; the caller then frees the row."""
        rows, memory, row = self._rows, self._memory, seq.row
        if rows.has_remainder(row) and not memory.have_place(preempted=True):
            return False
        saved = self._save(row)
        device = saved.block_ids
        if not self.store.have_host_blocks(len(device)):
            return False
        saved = self._with_remainder(saved, row)
        self._parked[seq.seq_id] = saved.in_blocks(memory.move_out(device, row))
        return True

    def identity_tokens(self, seq: Sequence) -> int:
        """Leading tokens of a parked sequence whose entries no event has changed."""
        counters = self._parked[seq.seq_id].counters
        return int(min(counters["num_unmodified_tokens"], counters["num_computed"]))

    def cached_blocks(self, columns: IntArray) -> IntArray:
        """What a row that comes back takes of cached ``columns [n, .]``: keys and values. All else
        comes from host memory."""
        entries = self._blocks.groups[0]
        return columns[:, : entries.tables[0].num_lanes * entries.cached_with_prefixes]

    def blocks_wanted(self, seq: Sequence, reserve: int) -> int:
        """Blocks that a parked row needs to come back and grow by ``reserve`` entries."""
        parked = self._parked[seq.seq_id]
        return self._blocks_to_resume(parked, True, _resume_at(parked, reserve))

    def restore(self, seq: Sequence, columns: IntArray) -> None:
        """Give a parked sequence a row, which shares cached ``columns [n, LG * R]``."""
        parked = self._parked.pop(seq.seq_id)
        row = self._rows.restore(seq, parked.counters)
        at = _resume_at(parked, 0)
        self._resume(row, parked, True, at, columns)
        self._blocks.queries.log_from(np.array([row]), np.array([at.log_from]))
        self._memory.bring_back(row, parked.block_ids)
        self._memory.release_place(parked.remainder)

    def discard(self, seq: Sequence) -> None:
        """Forget a parked sequence."""
        parked = self._parked.pop(seq.seq_id)
        self._memory.discard(parked.block_ids)
        self._memory.release_place(parked.remainder)

    def take_over(self, gone: SavedRows) -> None:
        """Go on counting where ``gone`` was, whose rows are given up: the device forgets what it
        keeps of them."""
        self.misses = gone.misses
        rows = [int(parked.block_ids[0]) for parked in gone._parked.values()]
        self._memory.discard_all_of(gone._memory, rows)

    # ---- continuations -----------------------------------------------------------------------

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
                seq.talk.first_prompt_tokens,
                seq.num_shareable,
                seq.talk.turns,
                tuple(seq.events),
                hashes[floor // size],
                hashes[seq.num_prompt_tokens // size],
            )
        )
        if seq.talk.resumed is not None:
            self.store.supersede(seq.talk.resumed.continuation)

    def find(self, seq: Sequence) -> Resumption | None:
        """What a waiting sequence may resume; after a preemption, only what it had resumed."""
        if seq.talk.continues_as is None or seq.talk.refuses is not None:
            return None
        if seq.talk.resumed is not None or seq.replay_until:
            found = seq.talk.resumed
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
        turns = seq.talk.turns or (*known.turns, Turn(computed, seq.num_prompt_tokens))
        end = np.array([turns[len(known.turns)].end])
        num_prompt, uncompressed = seq.trigger.next_turn(state, end)
        state = replace(state, num_prompt=num_prompt, first_uncompressed_pos=uncompressed)
        due = seq.trigger.next_event(state)
        due[0] = seq.next_event(computed, int(due[0]), len(known.events))
        target = max(min(seq.num_tokens, int(due[0])), computed)
        log_from = int(seq.trigger.log_from(state, due)[0])
        hosted = known.hosted
        at = ResumeAt(dropped, computed, target, log_from)
        blocks = self._blocks_to_resume(known.row, hosted, at)
        return NextTurn(found, known.row, hosted, int(due[0]), at, blocks)

    def resume_row(self, seq: Sequence, turn: NextTurn) -> int:
        """Give a sequence a row that resumes as planned; its new turn has not begun there yet."""
        computed = turn.at.computed
        if seq.talk.resumed is None:
            seq.talk.resumed = turn.resumption
            _take_history(seq, turn.resumption)
            self.store.take(turn.resumption)
            self._totals.resumed_total += 1
            self._totals.resumed_from_host_total += turn.hosted
            self._totals.resumed_tokens_total += turn.resumption.num_tokens
        rows, size = self._rows, self._blocks.layout.block_size
        row = rows.resume(seq, turn.row.counters)
        rows.num_computed[row] = seq.num_cached_tokens = computed
        rows.num_published[row] = min(rows.num_published[row], computed // size)
        self._resume(row, turn.row, turn.hosted, turn.at)
        return row

    def recall(self, seq: Sequence) -> None:
        """Let a sequence whose continuation was evicted be computed as that was: with its turns and
        its events, so that it holds no more than the continuation did."""
        if seq.talk.continues_as is None or seq.talk.refuses is not None or seq.replay_until:
            return
        gone = self._look_up(seq).gone
        if gone is not None:
            self.count_miss(seq)
            _take_history(seq, gone)
            seq.replay_until = gone.num_tokens

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

    # ---- both --------------------------------------------------------------------------------

    def _save(self, row: int) -> SavedRow:
        """What a row counts and holds in blocks."""
        rows, blocks = self._rows, self._blocks
        blocks.give_back_unused(np.array([row]), rows.num_computed[[row]])
        groups = tuple(group.save(row) for group in blocks.groups)
        return SavedRow(rows.park_row(row), groups)

    def _with_remainder(self, saved: SavedRow, row: int) -> SavedRow:
        """And its remainder, if it has one. There is a place for it."""
        if not self._rows.has_remainder(row):
            return saved
        return replace(saved, remainder=self._memory.save_remainder(row))

    def _blocks_to_resume(self, saved: SavedRow, hosted: bool, at: ResumeAt) -> int:
        """Blocks for ``_resume``, and for the row's growth up to its target."""
        each = zip(self._blocks.groups, saved.groups, strict=True)
        return sum(group.wanted_to_resume(row, hosted, at) for group, row in each)

    def _resume(
        self,
        row: int,
        saved: SavedRow,
        hosted: bool,
        at: ResumeAt,
        columns: IntArray | None = None,
    ) -> None:
        """Begin a row as a saved one. Queries logged before it begins to log are left out.

        It shares all full blocks. It writes more entries to the others, so it gets copies of those:
        at most one for each lane, and one for each lane's log. A ``hosted`` row is copied from host
        memory to private blocks; it shares cached ``columns [n, LG * R]`` of keys and values.
        """
        blocks, memory = self._blocks, self._memory
        move = memory.move_in if hosted else memory.copy
        blocks.start_row(row)
        memory.load_remainder(saved.remainder, row)
        for group, held in zip(blocks.groups, saved.groups, strict=True):
            tokens = group.resumed_tokens(held, at)
            if tokens is None:
                continue
            for table, there in zip(group.tables, held.tables, strict=True):
                own_from = there.first if hosted else tokens // table.block_tokens
                shared = None
                if columns is not None and columns.size and table is blocks.kv:
                    shared, own_from = columns, own_from + len(columns)
                move(*table.resume(row, there, tokens, own_from, shared))
            group.resume_fields(row, held, at)

    def check_integrity(self) -> None:
        """Every host block and every place is free, or belongs to one row that is away."""
        away = self._parked.values()
        saved = [known.row for known in self.store.all if known.row is not None]
        blocks = [self.store.named_blocks(hosted=True), *(row.block_ids for row in away)]
        self._memory.check_integrity(blocks, [row.remainder for row in (*away, *saved)])


def _resume_at(parked: SavedRow, reserve: int) -> ResumeAt:
    """Where a preempted row goes on that grows by ``reserve`` tokens."""
    computed, log_from = parked.counters["num_computed"], parked.groups[1].fields["_from"]
    return ResumeAt(0, int(computed), int(computed) + reserve, int(log_from))


def _take_history(seq: Sequence, found: Resumption) -> None:
    """Give a sequence the turns and the events of the continuation that it begins with."""
    known, computed = found
    seq.talk.first_prompt_tokens = known.first_prompt_tokens
    seq.talk.turns = *known.turns, Turn(computed, seq.num_prompt_tokens)
    seq.events = list(known.events)
    seq.num_shareable = min(seq.num_shareable, known.num_shareable)
