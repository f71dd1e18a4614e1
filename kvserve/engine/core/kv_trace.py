"""Which positions events drop, by layer and KV head, for sequences that asked for ``kv_trace``.

Move plans arrive while a step is launched, as they do for ``inspect``. They are copied to the host
asynchronously and read when the step is collected, so the host never waits for the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from kvserve.engine.compression.moves import LanePositions, MovePlan
from kvserve.engine.device.transfer import HostCopy
from kvserve.engine.runner.model_runner import ModelRunner
from kvserve.log import RequestError
from kvserve.outputs import KVTraceEvent
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import SchedulerOutput
from kvserve.scheduler.messages.saved_row import NO_PLACE

MOST_POSITIONS = 2**21
"""Limit on positions x layers x KV heads, summed over an engine's traced sequences."""


@dataclass(frozen=True, slots=True)
class TracedMove:
    """One event of one sequence, on its way to the host; no plan: the sequence (re)starts."""

    seq_id: int
    reason: str = "start"
    longest: int = 0
    blocks_released: int = 0
    queries: int = 0
    plan: HostCopy | None = None


class KVTracer:
    """Follows the sequences that were added, until they are dropped."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._layout = runner.cache.layout
        self._lanes: dict[int, LanePositions] = {}
        self.followed: dict[int, int] = {}
        """Positions x layers x KV heads that a sequence may have, by its id."""
        self._moves: list[TracedMove] = []

    def check(self, tokens: int) -> None:
        """Raise ``RequestError`` if a sequence of up to ``tokens`` tokens cannot be traced now."""
        if self._runner.group.size > 1:
            raise RequestError(
                "kv_trace follows positions on one rank only; use --tensor-parallel-size 1",
                param="kv_trace",
                code="kv_trace_not_allowed",
            )
        lanes = self._layout.num_layers * self._layout.num_kv_heads
        most = MOST_POSITIONS // lanes
        if tokens > most:
            raise RequestError(
                f"kv_trace follows at most {most} tokens of this model ({lanes} layers x KV "
                f"heads), and prompt and answer may have {tokens}; lower max_tokens",
                param="kv_trace",
                code="kv_trace_not_allowed",
            )
        if sum(self.followed.values()) + lanes * tokens > MOST_POSITIONS:
            raise RequestError(
                "as many requests with kv_trace run as this server follows; try again later",
                param="kv_trace",
                code="too_many_traces",
            )

    def add(self, seq_id: int, tokens: int) -> None:
        """Follow a sequence of at most ``tokens``, for which ``check`` found room."""
        self.followed[seq_id] = tokens * self._layout.num_layers * self._layout.num_kv_heads
        self._runner.compressor.on_moves = self._on_moves

    def drop(self, seq_id: int) -> None:
        """Stop following a sequence, which has ended."""
        if self.followed.pop(seq_id, None) is not None:
            self._lanes.pop(seq_id, None)
            if not self.followed:
                self._runner.compressor.on_moves = None

    def begin_step(self, output: SchedulerOutput) -> list[TracedMove]:
        """Start a trace for each sequence that gets a row; one that is swapped in keeps its own.

        Returns a list that the moves of the step are appended to as it is launched.
        """
        moves = () if output.moves is None else output.moves.ins
        back = {move.row for move in moves if move.place != NO_PLACE}
        self._moves = [
            TracedMove(new.seq_id)
            for new in output.admitted.requests
            if new.seq_id in self.followed and new.row not in back
        ]
        return self._moves

    def read(self, moves: list[TracedMove]) -> list[tuple[int, KVTraceEvent]]:
        """What the moves of a collected step dropped, as (sequence id, event)."""
        found = [(move.seq_id, self._event(move)) for move in moves if move.seq_id in self.followed]
        return [(seq_id, event) for seq_id, event in found if event is not None]

    def _on_moves(self, task: Events, plan: MovePlan) -> None:
        size = self._layout.block_size
        for e, seq_id in enumerate(task.seq_ids.tolist()):
            if seq_id not in self.followed:
                continue
            released = -(-task.old_lens[:, e] // size) - -(-task.new_lens[:, e] // size)
            numbers = [plan.src[e], plan.counts[e], plan.copy_start[e : e + 1]]
            self._moves.append(
                TracedMove(
                    seq_id,
                    "pressure" if task.early else "due",
                    int(task.old_lens[:, e].max()),
                    int(released.sum()),
                    int(task.plan.windows[e] * task.plan.num_queries[e]),
                    HostCopy(numbers, self._runner.batch.device),
                )
            )

    def _event(self, move: TracedMove) -> KVTraceEvent | None:
        layers, heads = self._layout.num_layers, self._layout.num_kv_heads
        if move.plan is None:
            self._lanes[move.seq_id] = LanePositions(layers, heads)
            nothing: list[list[list[int]]] = [[[] for _ in range(heads)] for _ in range(layers)]
            return KVTraceEvent(move.reason, time.time(), 0, nothing)
        held = self._lanes[move.seq_id]
        held.see_longest(move.longest)
        before = held.lanes
        source, counts, start = move.plan.wait()
        held.move(int(start[0]), source, counts)
        dropped = [
            [_runs(np.setdiff1d(*lanes, assume_unique=True)) for lanes in zip(*rows, strict=True)]
            for rows in zip(before, held.lanes, strict=True)
        ]
        if not any(runs for row in dropped for runs in row):
            return None
        return KVTraceEvent(
            move.reason, time.time(), held.seen, dropped, move.blocks_released, move.queries
        )


def _runs(positions: IntArray) -> list[int]:
    """Ascending ``positions`` as first, end, first, end and so on."""
    if not len(positions):
        return []
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    firsts = positions[np.concatenate([[0], breaks])]
    ends = positions[np.concatenate([breaks - 1, [len(positions) - 1]])] + 1
    return [int(x) for x in np.stack([firsts, ends], axis=1).ravel()]
