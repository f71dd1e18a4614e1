"""The scheduler: steps compute each sequence's tokens until ``num_computed`` is ``num_tokens``.

There is no prefill phase and no decode phase, so chunked prefill and recomputation after a
preemption need no code of their own. Compactions come first, so the same step can use the blocks
that they free.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import compress
from typing import TYPE_CHECKING, cast

import numpy as np

from kvserve.late import Late
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.cache_group import make_groups
from kvserve.scheduler.blocks.swap_memory import NoContinuations, SwapMemory, num_places
from kvserve.scheduler.compression.compression_scheduler import CompressionScheduler
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import ScheduledEvents, SchedulerOutput
from kvserve.scheduler.messages.sequence import Sequence, SequenceStatus
from kvserve.scheduler.rows.queue import WaitingQueue
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.step.admission import Admission, CaughtUp, first_event
from kvserve.scheduler.step.departures import Departures
from kvserve.scheduler.step.saved_rows import SavedRows
from kvserve.scheduler.step.settings import Parts, SchedulerSettings
from kvserve.scheduler.triggers.trigger import NO_EVENT, Trigger
from kvserve.stats import EngineStats

if TYPE_CHECKING:
    from kvserve.scheduler.blocks.continuations import Continuations
    from kvserve.scheduler.messages.drafts import Confirmed, Drafts
    from kvserve.scheduler.speculation.speculation import Speculation

_continuations = Late("scheduler.blocks.continuations:Continuations")
_continued_rows = Late("scheduler.step.continued_rows:ContinuedRows")
_state_admission = Late("scheduler.step.state_admission:StateAdmission")
_speculation = Late("scheduler.speculation.speculation:Speculation")


class Scheduler:
    """Owns the queue, the rows and the blocks; ``schedule`` and ``update`` alternate.

    A step may be scheduled while the tokens of one earlier step are unknown, but not of two. What
    depends on these tokens waits. If one of them ends its sequence, the token that the sequence
    computes in the new step is in vain, and ``update`` ignores it.

    When blocks run out, the scheduler first evicts cached prefix columns and continuations, then
    lets optional events come early, and then preempts sequences (``Departures``).
    """

    def __init__(
        self, layout: KVLayout, settings: SchedulerSettings, totals: EngineStats | None = None
    ) -> None:
        """``totals``: where to go on counting."""
        self.layout, self.settings = layout, settings
        self.totals = EngineStats() if totals is None else totals
        self.pool = BlockPool(settings.num_blocks)
        most_rows, longest = settings.max_num_seqs, settings.max_model_len
        places = num_places(most_rows, continuations=settings.continuations)
        swapped = SwapMemory(most_rows, places, settings.num_host_blocks)
        limit = settings.max_continuation_blocks
        store: Continuations
        if settings.continuations:
            store = _continuations(self.pool, swapped, layout.block_size, limit)
        else:
            store = cast("Continuations", NoContinuations(swapped))
        logged, further = settings.log_block_tokens, settings.further_groups
        groups = make_groups(self.pool, layout, most_rows, longest, logged, further)
        caching = settings.prefix_caching
        self.blocks = BlockManager(layout, self.pool, groups, store, prefix_caching=caching)
        rows = self.rows = RowTable(most_rows, longest, self.blocks)
        observed = settings.max_observed_tokens or settings.max_num_batched_tokens
        self.events = CompressionScheduler(rows, self.blocks, observed, self.totals)
        saved = _continued_rows if settings.continuations else SavedRows
        self.saved: SavedRows = saved(rows, self.blocks, self.totals)
        self.waiting = WaitingQueue(settings.max_num_seqs_per_client)
        parts = Parts(rows, self.blocks, self.events, self.waiting, self.saved)
        self.departures = Departures(parts, self.totals)
        keeps = caching and any(group.kind == "states" for group in groups)
        admission = _state_admission if keeps else Admission
        self._admission: Admission = admission(parts, self.departures, settings)
        self.speculation: Speculation | None = None
        if settings.speculation is not None:
            budget, how = settings.max_num_batched_tokens, settings.speculation
            self.speculation = _speculation(rows, self.blocks, how, budget, self.totals)
        self._arrivals = 0

    # ---- requests ----------------------------------------------------------------------------

    def blocks_at_least(self, num_prompt: int, max_len: int, trigger: Trigger) -> int:
        """The fewest blocks with which a sequence can get past its prompt and its first event."""
        due, log_from = first_event(num_prompt, trigger)
        tokens = num_prompt + 1 if due == NO_EVENT else min(due, max_len)
        return self.blocks.blocks_alone(tokens, log_from, trigger.log_stride)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence; the caller has checked that it can fit at all."""
        seq.arrival = self._arrivals
        self._arrivals += 1
        self.events.register(seq)
        self.waiting.add(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now and free its blocks; the next step frees its row."""
        self.departures.finish(seq, reason)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.rows.num_rows)

    @property
    def running(self) -> list[Sequence]:
        """Sequences that hold a row and have not ended."""
        return [seq for seq in self.rows.live() if seq.status is SequenceStatus.RUNNING]

    # ---- one step ----------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Choose what the next step computes; on return, tables and lengths are those after it.

        The four phases run in the same order on the device, so each may use the blocks that the
        earlier ones have freed. The invariant of progress: while rows are in use, a step decodes,
        catches up, admits, has an event, scores one that will find its blocks, or follows a step in
        flight whose tokens and counts will allow more. If it does none of these, the newest
        sequences are preempted, one by one, until it does (``Admission.catch_up``).
        """
        rows = self.rows
        self.blocks.pass_by(rows.num_computed[: rows.num_rows])
        unknown = rows.num_unknown[: rows.num_rows].any()
        scoring = bool(self.events.scoring)
        events = self._compress()
        decoding = self._make_room()
        # Each decoding row gets the blocks of one more token, and counts that token. What it
        # guesses gets blocks too, and is not counted before it is confirmed.
        drafts = None if self.speculation is None else self.speculation.propose()
        in_front = slice(len(decoding))
        new = np.ones_like(decoding) if drafts is None else drafts.lengths
        self.blocks.grow(in_front, new, rows.num_computed[in_front])
        self.blocks.kv_lens[:, in_front] += 1
        rows.num_computed[in_front] += 1
        # It is no progress to score an event that then finds no blocks, again and again.
        blocked_on_blocks = self.events.blocked_on_blocks and rows.num_rows > 1
        moves = bool(events.observations or scoring) and not blocked_on_blocks
        moves = moves or bool(len(decoding) or unknown or events.compactions)
        decoded = len(decoding) if drafts is None else len(drafts.token_ids)
        caught_up = self._admission.catch_up(decoded, moves=moves)
        return self._output(events, decoding, drafts, caught_up)

    def _compress(self) -> ScheduledEvents:
        """Schedule events that are due, and early ones if this step's decodes lack blocks."""
        scheduled = self.events.compact_due()
        missing = self._missing(self.rows.decoding_next())
        if missing:  # so no continuation was moved: events may not write its blocks in this step
            early = self.events.compact_early(missing)
            scheduled = replace(scheduled, compactions=scheduled.compactions + early)
        return scheduled

    def _make_room(self) -> IntArray:
        """Move decoding rows to the front, and preempt until each finds its blocks. Returns them.

        A client that is crowded out is made way for, where rows or blocks are what it waits for.
        """
        self.departures.drop_finished()
        self.rows.demote_waiting()
        self.rows.promote_ready()
        first, lacking = self.waiting.first, self._admission.lacks_blocks
        self._admission.lacks_blocks = None
        if first is not None and (first is lacking or self.rows.num_rows == self.rows.max_rows):
            self.departures.make_way(first)
        while self._missing(np.arange(self.rows.num_decoding, dtype=np.int32)):
            self.departures.preempt()
        return np.arange(self.rows.num_decoding, dtype=np.int32)

    def _output(
        self,
        events: ScheduledEvents,
        decoding: IntArray,
        drafts: Drafts | None,
        caught_up: CaughtUp,
    ) -> SchedulerOutput:
        """Build the message from the phases' choices and what changed in tables, rows and swaps."""
        rows, n = self.rows, self.rows.num_rows
        sampled = np.concatenate([decoding, caught_up.rows[caught_up.sampled]])
        sampled_at = rows.num_tokens[sampled]
        rows.caught_up[sampled] = 1
        rows.num_tokens[sampled] += 1  # counted, not known: the device has them as ``last_token``
        rows.num_unknown[sampled] += 1
        np.maximum(rows.peak_blocks[:n], self.blocks.blocks_of_rows(n), out=rows.peak_blocks[:n])
        scheduled = np.concatenate([decoding, caught_up.prefill.rows])
        # Of the longest of a row's groups.
        entries = self.blocks.kv_lens[:, scheduled].max(axis=(0, 2))
        tokens = rows.num_computed[scheduled]
        if drafts is not None:
            guessed = drafts.lengths - 1
            entries[: len(guessed)] += guessed
            tokens[: len(guessed)] += guessed
        self.totals.steps_total += 1
        return SchedulerOutput(
            events=events,
            row_swaps=rows.take_swaps(),
            moves=self.blocks.continuations.host.take_moves(),
            admitted=caught_up.admitted,
            table_updates=self.blocks.take_updates(n),
            num_decoding=len(decoding),
            drafts=drafts,
            prefill=caught_up.prefill,
            columns=-(-entries // self.layout.block_size),
            token_columns=-(-tokens // self.layout.block_size),
            logs_queries=self.blocks.queries.is_used(n),
            pruned=caught_up.pruned,
            sampled_chunks=caught_up.sampled,
            sampled=tuple(map(rows.owner, sampled.tolist())),
            sampled_at=sampled_at,
        )

    def _missing(self, at: IntArray) -> int:
        """Blocks that are missing for one more token in each of the rows ``at``."""
        if len(at) * self.blocks.num_lanes <= self.pool.num_free:
            return 0  # a token needs at most a block in each table
        wanted = self.blocks.missing_blocks(at, np.ones_like(at), self.rows.num_computed[at])
        return 0 if self.blocks.have_free(wanted) else wanted - self.pool.num_free

    # ---- results of a step -------------------------------------------------------------------

    def may_overlap(self, output: SchedulerOutput) -> bool:
        """Whether the step behind ``output`` may be scheduled before its tokens are known: guesses
        follow known tokens, and say how many there are."""
        return self.speculation is None or (output.drafts is None and self.speculation.rests)

    def confirm(self, output: SchedulerOutput, token_ids: IntArray) -> Confirmed | None:
        """What sequences get of the sampled tokens, if the step had drafts."""
        return None if self.speculation is None else self.speculation.confirm(output, token_ids)

    def update(
        self,
        output: SchedulerOutput,
        token_ids: IntArray,
        scores: Iterable[IntArray] = (),
        confirmed: Confirmed | None = None,
    ) -> list[Sequence]:
        """Record the sampled tokens, in the order of ``output.sampled``; return ended sequences.

        ``scores`` say what each of ``output.events.observations`` will keep; ``confirmed`` is what
        ``confirm`` says.
        """
        rows = self.rows
        for events, answer in zip(output.events.observations, scores, strict=True):
            self.events.take_scores(events, answer)
        finished = self.departures.take_exhausted()
        sequences, places = output.sampled, output.sampled_at
        if self.speculation is not None and confirmed is not None:
            places, token_ids = self.speculation.take_in(output, token_ids, confirmed)
        running = [seq.status is SequenceStatus.RUNNING for seq in sequences]
        if not all(running):
            finished += self._learn_late(output, token_ids)
            sequences = tuple(compress(sequences, running))
            places, token_ids = places[running], token_ids[running]
        at = np.fromiter((seq.row for seq in sequences), np.int32, len(sequences))
        rows.token_ids[at, places] = token_ids
        rows.num_unknown[at] -= 1
        stopped = (rows.stop_ids[at] == token_ids[:, None]).any(axis=1)
        for i in np.flatnonzero(stopped | (places + 1 >= rows.max_len[at])):
            self.departures.end(sequences[i], int(token_ids[i]) if stopped[i] else None)
            finished.append(sequences[i])
        return finished

    def check_integrity(self) -> None:
        """Blocks, lengths and rows agree; for tests and for idle moments."""
        self.blocks.check_integrity()
        self.saved.check_integrity()
        self.waiting.check_integrity(self.running)
        n = self.rows.num_rows
        assert self.rows.num_decoding <= n
        assert all(seq.row == row for row, seq in enumerate(self.rows.live()))
        assert not self.blocks.kv.end[:, n:].any(), "a row without a sequence holds blocks"

    def _learn_late(self, output: SchedulerOutput, token_ids: IntArray) -> list[Sequence]:
        """Record tokens of sequences that have lost their rows; return those that these end."""
        late = [
            (seq, int(token))
            for seq, token in zip(output.sampled, token_ids, strict=True)
            if seq.status is SequenceStatus.WAITING
        ]
        for seq, token in late:
            seq.token_ids[-1], seq.awaits_token = token, False
            stopped = token in seq.stop_token_ids
            if stopped or seq.num_tokens >= seq.max_len:
                self.departures.end(seq, token if stopped else None)
        return [seq for seq, _ in late if seq.status is SequenceStatus.FINISHED]
