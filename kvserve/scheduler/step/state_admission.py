"""Admission of models some of whose layers keep states: prompts begin where a state is kept, and
chunks end where one will be.

A state is kept at ends of chunks alone. Chunks end for it at a multiple of ``StateSpec.every``
tokens, at the last ``BOUNDARY`` tokens of a prompt (the next turn of a conversation begins there),
and where the blocks end that a prompt shares with earlier ones (the next one parts there, too).
"""

from __future__ import annotations

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.kept_states import KeptStates
from kvserve.scheduler.blocks.state_group import StateGroup
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.step.admission import Admission, Chunk, StepBudget
from kvserve.scheduler.step.departures import Departures
from kvserve.scheduler.step.settings import Parts, SchedulerSettings


class StateAdmission(Admission):
    """No chunk has one token because of it: such a call is of another form than one of several in
    transformers' Nemotron-H."""

    def __init__(self, parts: Parts, departures: Departures, settings: SchedulerSettings) -> None:
        super().__init__(parts, departures, settings)
        blocks, states = parts.blocks, parts.blocks.find(StateGroup)
        assert states is not None
        self._states = states
        memory, first = blocks.continuations.host, states.spec.max_rows
        places = range(first, first + states.spec.num_kept)
        self._kept = KeptStates(
            blocks.pool, memory, places, states.spec.all_bytes, departures.totals
        )
        blocks.prefix_cache = states.kept = self._kept
        self._unit = blocks.prefix_columns * self._size
        self._every = -(-states.spec.every // self._unit) * self._unit
        self._shared = 0
        """Tokens of the sequence that was matched last whose blocks are cached."""

    def _match(self, seq: Sequence, limit: int) -> IntArray:
        """As ``Admission`` finds them, up to the newest kept state. A row that comes back from host
        memory brings its own."""
        if seq in self._saved:
            return super()._match(seq, limit)
        columns = super()._match(seq, limit - 1)  # two tokens are left
        self._shared = len(columns) * self._size
        hashes, every = seq.column_hashes, self._blocks.prefix_columns
        while len(columns) > (end := self._kept.newest(hashes[: len(columns)], every)):
            columns = self._blocks.match(hashes[:end])
        return columns

    def _start(self, seq: Sequence, columns: IntArray, target: int) -> None:
        super()._start(seq, columns, target)
        self._states.shared[seq.row] = self._shared
        if len(columns):
            self._kept.load(seq.column_hashes[len(columns) - 1], seq.row)

    def _chunk_length(self, seq: Sequence, computed: int, target: int, budget: StepBudget) -> int:
        ends = (end for end in self._ends(seq, computed) if computed + 2 <= end <= target - 2)
        return super()._chunk_length(seq, computed, min(ends, default=target), budget)

    def _add_chunk(self, chunks: list[Chunk], row: int, budget: StepBudget) -> None:
        before, computed = len(chunks), int(self._rows.num_computed[row])
        super()._add_chunk(chunks, row, budget)
        if len(chunks) == before:
            return
        seq, end = self._rows.owner(row), computed + chunks[-1][1]
        # Published columns are of the tokens alone: no event came before their end.
        is_true = end <= self._rows.num_published[row] * self._size
        if is_true and end in self._ends(seq, computed):
            self._kept.keep(seq.column_hashes[end // self._size - 1], row)

    def _ends(self, seq: Sequence, computed: int) -> tuple[int, ...]:
        """Where the next chunks of a prompt may have to end."""
        prompt, unit = seq.num_prompt_tokens, self._unit
        last = prompt if prompt % unit == 0 else (prompt - 2) // unit * unit
        most, shared = last, 0
        if seq.row >= 0:
            most = min(last, int(self._rows.num_unmodified_tokens[seq.row]))
            shared = int(self._states.shared[seq.row])
        ends = (computed // self._every + 1) * self._every, last, shared
        return tuple(end * (end <= most) for end in ends)
