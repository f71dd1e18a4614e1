"""The device's side of the rows: tokens, lengths, tables and sampling settings, kept in place.

The device owns ``kv_lens`` and ``num_computed``; the scheduler's message says only what changes.
Decode ids come from ``last_token``, so a step can be prepared before the last one's tokens are
known to the host.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch, Span
from kvserve.engine.sampler import SamplingRows
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.scheduler.block_pool import IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import CompactionTask, SchedulerOutput, TableUpdate


class InputBatch:
    """Persistent rows. ``apply`` takes in a message, ``build`` makes the forward's arguments."""

    def __init__(
        self,
        layout: KVLayout,
        max_rows: int,
        table_shape: tuple[int, ...],
        log_shape: tuple[int, ...],
        log_block_tokens: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.layout = layout
        self.dtype = dtype
        self.device = device
        self.log_block_tokens = log_block_tokens
        self.block_tables = torch.zeros(table_shape, dtype=torch.int32, device=device)
        self.log_tables = torch.zeros(log_shape, dtype=torch.int32, device=device)
        self.kv_lens = torch.zeros(table_shape[:3], dtype=torch.int64, device=device)
        self.num_computed = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.prompt_lens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.log_from = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingRows(max_rows, vocab_size, device)
        self._kept_scores: dict[int, Tensor] = {}
        self._parked_scores: dict[int, dict[int, Tensor]] = {}

    def apply(self, output: SchedulerOutput) -> None:
        """Swap rows, set up newcomers, take over table entries. Compactions have run before."""
        self._swap(output.row_swaps)
        self._park_scores(output)
        new = output.admitted
        if new.sequences:
            rows = torch.tensor([seq.row for seq in new.sequences], device=self.device)
            prompts = [seq.num_prompt_tokens for seq in new.sequences]
            self.prompt_lens[rows] = torch.tensor(prompts, device=self.device)
            self.kv_lens[:, rows] = self._long(new.kv_lens)
            self.num_computed[rows] = self._long(new.num_computed)
            self.log_from[rows] = self._long(new.log_from)
            self.last_token[rows] = self._long(new.last_token)
            self.sampling.set_rows(new.sequences)
        _scatter(self.block_tables, output.table_update)
        _scatter(self.log_tables, output.log_update)

    def kept_scores(self, policy_id: int, count: int) -> Tensor | None:
        """Scores [rows, L, Hkv, count] that a policy keeps from event to event, if any."""
        if count and policy_id not in self._kept_scores:
            lanes = self.layout.num_layers, self.layout.num_kv_heads
            shape = (len(self.last_token), *lanes, count)
            self._kept_scores[policy_id] = torch.zeros(shape, device=self.device)
        return self._kept_scores.get(policy_id)

    def forget_scores(self, policy_id: int) -> None:
        """Give back what a policy kept that nobody uses any more."""
        self._kept_scores.pop(policy_id, None)

    def after_compaction(self, task: CompactionTask) -> None:
        """Each group of each row holds what the task left it."""
        rows = self._long(task.rows)
        self.kv_lens[:, rows] = self._long(task.new_lens)
        self.log_from[rows] = self._long(task.log_from)

    def build(self, output: SchedulerOutput) -> tuple[Tensor, ForwardBatch]:
        """Token ids [T] and the batch, its new entries counted."""
        decoding, prefill = output.num_decoding, output.prefill
        rows = torch.cat(
            [
                torch.arange(decoding, device=self.device),
                self._long(np.repeat(prefill.rows, prefill.lengths)),
            ]
        )
        offsets = np.concatenate([np.zeros(decoding, np.int32), ragged_arange(prefill.lengths)])
        offset = self._long(offsets)
        input_ids = torch.cat([self.last_token[:decoding], self._long(prefill.token_ids)])
        positions = self.num_computed[rows] + offset
        entries = (self.kv_lens[:, rows] + offset[:, None]).transpose(1, 2)
        slots = slot_mapping(self.block_tables, rows, entries, self.layout.block_size)
        query_slots = self._query_slots(rows, positions) if output.logs_queries else None
        before = self.kv_lens.clone()
        self.kv_lens[:, :decoding] += 1
        self.num_computed[:decoding] += 1
        chunk_rows, lengths = self._long(prefill.rows), self._long(prefill.lengths)
        self.kv_lens[:, chunk_rows] += lengths[:, None]
        self.num_computed[chunk_rows] += lengths
        spans = (*self._decode_spans(output), *self._chunk_spans(output, before))
        prompt_lens = self.prompt_lens[rows]
        return input_ids, ForwardBatch(positions, prompt_lens, slots, query_slots, spans)

    def revisit(self, rows: IntArray, positions: IntArray, entries: IntArray) -> ForwardBatch:
        """A forward over tokens that are stored already; each sees its row up to its own entry.

        rows: [P]; positions (logical), entries (physical): [P, Q].
        """
        at, seen = self._long(rows), self._long(entries)
        columns = int(entries.max()) // self.layout.block_size + 1
        tables = self.block_tables[:, at, :, :columns].contiguous()
        last = seen[None, :, None].expand(*tables.shape[:3], -1)
        tokens = torch.arange(positions.size, device=self.device).view(positions.shape)
        span = Span(tokens, None, tables, self._mask(last.flatten(1, 2), columns))
        prompt_lens = self.prompt_lens[at].repeat_interleave(positions.shape[1])
        nowhere = tables.new_empty(0)
        return ForwardBatch(self._long(positions).view(-1), prompt_lens, nowhere, None, (span,))

    def _query_slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Where queries go: their log slot, or the null block for those nobody will ask for."""
        lanes = positions.expand(*self.log_tables.shape[:1], self.layout.rows, -1)
        slots = slot_mapping(self.log_tables, rows, lanes, self.log_block_tokens)
        return torch.where(positions >= self.log_from[rows], slots, 0)

    def _decode_spans(self, output: SchedulerOutput) -> list[Span]:
        """One span per size class of lengths, so that short rows do not pay for long ones."""
        count = output.num_decoding
        columns = output.columns[:count]
        classes = _size_class(columns, least=8)
        spans = []
        for size in np.unique(classes):
            at = np.flatnonzero(classes == size)
            width = int(columns[at].max())
            if len(at) == count:
                tables, lens = self.block_tables[:, :count], self.kv_lens[:, :count]
                tokens = None
            else:
                rows = self._long(at)
                tables, lens = self.block_tables[:, rows], self.kv_lens[:, rows]
                tokens = rows[:, None]
            last = (lens - 1).flatten(1)[..., None]
            mask = self._mask(last, width)
            spans.append(Span(tokens, None, tables[..., :width].contiguous(), mask))
        return spans

    def _chunk_spans(self, output: SchedulerOutput, before: Tensor) -> list[Span]:
        """Chunks of similar length over caches of similar length attend as one padded batch."""
        prefill = output.prefill
        first_token = output.num_decoding + np.cumsum(prefill.lengths) - prefill.lengths
        columns = output.columns[output.num_decoding :]
        classes = _size_class(prefill.lengths, least=1) * 64 + _size_class(columns, least=8)
        spans = []
        for size in np.unique(classes):
            at = np.flatnonzero(classes == size)
            lengths, width = prefill.lengths[at], int(prefill.lengths[at].max())
            place = np.minimum(np.arange(width), lengths[:, None] - 1)
            tokens = self._long(first_token[at][:, None] + place)
            valid = None
            if lengths.min() < width:
                valid = torch.as_tensor(np.arange(width) < lengths[:, None], device=self.device)
            rows = self._long(prefill.rows[at])
            last = before[:, rows][..., None] + self._long(place)[:, None]
            tables = self.block_tables[:, rows, :, : int(columns[at].max())].contiguous()
            spans.append(
                Span(tokens, valid, tables, self._mask(last.flatten(1, 2), tables.shape[3]))
            )
        return spans

    def _mask(self, last: Tensor, columns: int) -> Tensor:
        """last: [LG, rows, Q], each query's last visible entry -> [LG, rows, 1, Q, columns * B]."""
        entries = torch.arange(columns * self.layout.block_size, device=self.device)
        visible = torch.zeros((), dtype=self.dtype, device=self.device)
        return torch.where(entries <= last[..., None], visible, -torch.inf)[:, :, None]

    def _park_scores(self, output: SchedulerOutput) -> None:
        """What policies keep of a row goes with it to host memory, and comes back."""
        for task in output.swap_outs:
            kept = self._kept_scores.items()
            self._parked_scores[task.place] = {i: scores[task.row].cpu() for i, scores in kept}
        for task in output.swap_ins:
            for i, scores in self._parked_scores.pop(task.place).items():
                if i in self._kept_scores and self._kept_scores[i].shape[1:] == scores.shape:
                    self._kept_scores[i][task.row] = scores.to(self.device)

    def _swap(self, swaps: tuple[tuple[int, int], ...]) -> None:
        if not swaps:
            return
        order = np.arange(len(self.last_token))
        for a, b in swaps:
            order[a], order[b] = order[b], order[a]
        moved = np.flatnonzero(order != np.arange(len(order)))
        to, source = self._long(moved), self._long(order[moved])
        kept_scores = self._kept_scores.values()
        counters = self.num_computed, self.prompt_lens, self.last_token, self.log_from
        for by_row in (*counters, *kept_scores):
            by_row[to] = by_row[source]
        for by_group in (self.block_tables, self.log_tables, self.kv_lens):
            by_group[:, to] = by_group[:, source]
        self.sampling.move_rows(moved, order[moved])

    def _long(self, array: IntArray) -> Tensor:
        return torch.as_tensor(array, device=self.device).long()


def _scatter(tables: Tensor, update: TableUpdate) -> None:
    if len(update.indices):
        where = torch.as_tensor(update.indices, device=tables.device).long()
        tables.view(-1)[where] = torch.as_tensor(update.blocks, device=tables.device)


def _size_class(sizes: IntArray, least: int) -> IntArray:
    """0 up to ``least``, then one class per doubling."""
    classes: IntArray = np.ceil(np.log2(np.maximum(sizes, least) / least)).astype(np.int64)
    return classes
