"""The rows' arrays on the device: tokens, lengths, tables and sampling settings.

The device owns ``kv_lens`` and ``num_computed``; the scheduler's message says only what changes.
Decode ids come from ``last_token``, so a step can be prepared before the last one's tokens are
known to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import put, to_device
from kvserve.engine.sampling.sampler import SamplingRows
from kvserve.kernels.attend.decode_inputs import (
    Chunks,
    DecodeInputs,
    FillInputs,
    RowTables,
    decode_inputs,
)
from kvserve.late import Late, Made
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import NewRequest, SchedulerOutput
from kvserve.scheduler.row_schema import RowArrays, per_group, per_row

if TYPE_CHECKING:
    from kvserve.engine.cache.kept_scores import KeptScores
    from kvserve.engine.cache.row_groups import RowGroup
    from kvserve.scheduler.messages.event import Events

_kept_scores = Late("engine.cache.kept_scores:KeptScores")


class InputBatch(RowArrays):
    """Persistent rows. ``apply`` takes in a message, ``build`` makes the forward's arguments."""

    kv_lens: Tensor = per_group("kv_lens")
    block_tables: Tensor = per_group(None)
    """Entries of this table and the next come as updates."""
    log_tables: Tensor = per_group(None)
    num_computed: Tensor = per_row("num_computed")
    prompt_lens: Tensor = per_row("prompt_lens")
    last_token: Tensor = per_row("last_token")
    log_from: Tensor = per_row("log_from")
    log_span: Tensor = per_row("log_span")
    log_stride: Tensor = per_row("log_stride")
    rounded_at: Tensor = per_row("rounded_at")

    def __init__(
        self,
        layout: KVLayout,
        max_rows: int,
        table_shape: tuple[int, ...],
        log_shape: tuple[int, ...],
        log_block_tokens: int,
        vocab_size: int,
        device: str,
        groups: Sequence[RowGroup] = (),
        remainders: Remainders | None = None,
        decode_inputs: FillInputs = decode_inputs,
    ) -> None:
        self.layout = layout
        self.device = device
        self.groups = groups
        """Those beside keys and values and logged queries."""
        self._writers = [group for group in groups if group.writes]

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.block_tables, self.log_tables = (
            zeros(shape, torch.int32) for shape in (table_shape, log_shape)
        )
        tables = [table for group in groups for table in group.tables]
        self._tables = [self.block_tables, self.log_tables, *tables]
        self.make_by_group(lambda: zeros(table_shape[:3], torch.int64))
        self.make_by_row(lambda fields: zeros((fields, max_rows), torch.int64))
        for divisor in (self.log_span, self.log_stride):
            divisor.fill_(1)  # padded rows divide by it, too
        self.where = RowTables(
            *(self.block_tables, self.kv_lens, self.num_computed),
            *(self.log_tables, self.log_from, self.log_span, self.log_stride),
            *(layout.block_size, log_block_tokens),
        )
        self._decode_inputs = decode_inputs
        self.remainders = remainders
        self._beside: list[RowGroup | Remainders] = [*groups, *filter(None, [remainders])]
        self._rows = torch.arange(max_rows, device=device)
        self.sampling = SamplingRows(max_rows, vocab_size, device)
        self.kept_scores: Made[KeptScores] = Made(lambda: _kept_scores(layout, max_rows, device))

    def apply(self, output: SchedulerOutput) -> None:
        """Swap rows, set up new ones, update the tables. Compactions have run before."""
        if output.row_swaps:
            self._swap(output.row_swaps)
        moves = output.moves
        if moves is not None:
            if self.kept_scores.made is not None:
                self.kept_scores.made.swap(moves)
            # Before rows begin, since a new one may have the number of one that leaves.
            for each in self._beside:
                each.swap(moves.outs, back=False)
        new = output.admitted
        if new.requests:
            rows = self._long([request.row for request in new.requests])
            self.begin_rows(rows, new, self._long)
            for each in self._beside:
                each.begin(rows)
            self.sampling.set_rows(new.requests)
        if moves is not None:
            for each in self._beside:
                each.swap(moves.ins, back=True)
        for table, update in zip(self._tables, output.table_updates, strict=True):
            if len(update.indices):
                put(table.view(-1), update.indices, update.blocks)

    def unfit(self, requests: Iterable[NewRequest]) -> list[int]:
        """Ids of new sequences that cannot be set up; called when setting up all has failed."""
        found = []
        for request in requests:
            try:
                self.sampling.set_rows((request,))
            except Exception:
                found.append(request.seq_id)
        return found

    def after_compaction(self, task: Events) -> None:
        """Set the rows' lengths to those that ``task`` leaves."""
        put(self.kv_lens.transpose(0, 1), task.rows, task.new_lens.swapaxes(0, 1))
        put(self.log_from, task.rows, task.log_from)
        rounds = task.rounds
        if rounds.any():
            put(self.rounded_at, task.rows[rounds], task.rounded_at[rounds])
        for group in self.groups:
            group.after_compaction(task, self._long(task.rows))

    def add_to_fingerprint(self, rows: IntArray, group: RankGroup) -> None:
        """Let ``group`` compare these rows' lengths, positions and last tokens."""
        at = self._long(rows)
        for lengths in (self.kv_lens[:, at], self.num_computed[at], self.last_token[at]):
            group.add_to_fingerprint(lengths)

    def build(self, output: SchedulerOutput) -> tuple[Tensor, ForwardBatch]:
        """Token ids [T] and the batch; the rows' lengths count its new entries from here on."""
        decoding, prefill, drafts = output.num_decoding, output.prefill, output.drafts
        rows = np.concatenate([np.arange(decoding, dtype=np.int32), prefill.rows])
        first = np.ones(decoding, np.int32) if drafts is None else drafts.lengths
        lengths = np.concatenate([first, prefill.lengths])
        at: Tensor | slice
        chunk_rows: Tensor | slice
        if len(prefill.rows) or drafts is not None:
            at, offset = self._long(np.repeat(rows, lengths)), self._long(ragged_arange(lengths))
            chunk_rows, added = self._long(rows), self._long(lengths)
            known = self.last_token[:decoding]
            if drafts is not None:
                known = self._long(drafts.token_ids)
            input_ids = torch.cat([known, self._long(prefill.token_ids)])
        else:  # views of the first rows: no numbers have to go to the device
            at = chunk_rows = slice(decoding)
            offset, added = self.num_computed.new_zeros(1), self.num_computed.new_ones(1)
            input_ids = self.last_token[at]
        # RoPE goes by the logical length, slots and what a token sees by the physical one.
        positions = self.num_computed[at] + offset
        entries = (self.kv_lens[:, at] + offset[:, None]).transpose(1, 2).contiguous()
        by_token = self._rows[at]
        query_slots = self.where.query_slots(by_token, positions) if output.logs_queries else None
        self.kv_lens[:, chunk_rows] += added[:, None]
        self.num_computed[chunk_rows] += added
        batch = ForwardBatch(
            positions=positions,
            prompt_lens=self.prompt_lens[at],
            slots=self.where.slots(by_token, entries),
            query_slots=query_slots,
            last=entries,
            tables=self.block_tables,
            rows=rows,
            starts=_starts(lengths),
            columns=output.columns,
            recent=self.where.recent(by_token, positions) if output.logs_queries else None,
            remainders=self.remainders,
            further=self._further_slots(by_token, positions),
            **self._of_groups(),
        )
        for group in self.groups:
            batch = group.over(batch, by_token, output.token_columns, self.rounded_at)
        return input_ids, batch

    def decoding(
        self, size: int, logs_queries: bool, starts: IntArray | None = None
    ) -> ForwardBatch:
        """Buffers for one token of each of the first ``size`` rows, or for chunks that begin at
        ``starts [size + 1]``: tokens see nothing, and are stored in the null block. The buffers'
        addresses never change; ``update_graph_inputs`` fills them anew for a step that is captured
        or recorded. Rows may be as long as the tables allow."""
        groups, _, heads, columns = self.block_tables.shape
        tokens = size if starts is None else int(starts[-1])
        slots = torch.zeros(groups, heads, tokens, dtype=torch.int64, device=self.device)
        positions = slots.new_zeros(tokens)
        lanes = [group.tables[0].shape for group in self._writers]
        batch = ForwardBatch(
            positions=positions,
            prompt_lens=self.prompt_lens[:size] if starts is None else positions + 1,
            slots=slots,
            query_slots=torch.zeros_like(slots) if logs_queries else None,
            last=torch.full_like(slots, -1),
            tables=self.block_tables,
            rows=np.arange(size),
            starts=np.arange(size + 1) if starts is None else starts,
            columns=np.full(size, columns),
            recent=positions + 1 if logs_queries else None,
            remainders=self.remainders,
            further=tuple(slots.new_zeros(lane[0], lane[2], tokens) for lane in lanes),
            **self._of_groups(),
        )
        for group in self.groups:
            batch = group.nothing_of(batch)
        return batch

    def padding(self, tokens: int) -> ForwardBatch:
        """A chunk of ``tokens`` tokens that see no entries and are stored in the null block."""
        return self.decoding(1, True, np.array([0, tokens]))

    def update_graph_inputs(
        self, batch: ForwardBatch, count: Tensor, chunks: Chunks | None = None
    ) -> Tensor:
        """Fill ``decoding``'s buffers for the first ``count []`` rows, and count their new entries.

        Returns each row's newest token, at the same address each time. The other rows' tokens, and
        those that are not real, see no entries and are stored in the null block: those rows may be
        of sequences that this step skips.
        """
        logged = batch.query_slots, batch.recent
        inputs = DecodeInputs(batch.positions, batch.slots, batch.last, *logged, chunks)
        self._decode_inputs(self.where, inputs, count)
        if chunks is not None:
            torch.index_select(self.prompt_lens, 0, chunks.rows, out=batch.prompt_lens)
        if self.groups:
            rows = self._rows[: len(batch.rows)] if chunks is None else chunks.rows
            real = rows < count
            if chunks is not None:
                real &= chunks.real
            for group in self.groups:
                group.update(batch, rows, real, self.rounded_at)
            new = self._further_slots(rows, batch.positions)
            for buffer, slots in zip(batch.further, new, strict=True):
                buffer.copy_(torch.where(real, slots, 0))
        return self.last_token[: len(batch.rows)]

    def _of_groups(self) -> dict[str, Any]:
        """What further groups add to a batch."""
        added: dict[str, Any] = {}
        for group in self.groups:
            added |= group.of_batch()
        return added

    def _further_slots(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Where each writing group stores the tokens at ``positions [T]`` of ``rows [T]``."""
        return tuple(group.slots(rows, positions) for group in self._writers)

    def _swap(self, swaps: tuple[tuple[int, int], ...]) -> None:
        order = np.arange(len(self.last_token))
        for a, b in swaps:
            order[a], order[b] = order[b], order[a]
        moved = np.flatnonzero(order != np.arange(len(order)))
        to, source = self._long(moved), self._long(order[moved])
        self.move_rows(to, source)
        if self.kept_scores.made is not None:
            self.kept_scores.made.move(to, source)
        for each in self._beside:
            each.move(to, source)
        self.sampling.move_rows(moved, order[moved])

    def _long(self, array: IntArray | list[int]) -> Tensor:
        return to_device(array, self.device)


def _starts(lengths: IntArray) -> IntArray:
    """Starts of consecutive runs of these ``lengths``, and the end of the last one."""
    return np.concatenate([np.zeros(1, lengths.dtype), np.cumsum(lengths)])
