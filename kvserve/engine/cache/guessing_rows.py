"""The rows for which a draft model guesses, as those of a step that is captured or recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.draft_rows import DraftRows
from kvserve.engine.cache.step_buffers import fill_buffers, step_buffers
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.decode_inputs import Chunks, FillInputs, RowTables
from kvserve.scheduler.arrays import IntArray


class GuessingRows:
    """The rows that guess, side by side: the first n of tables at addresses that never change."""

    def __init__(
        self,
        rows: DraftRows,
        prompt_lens: Tensor,
        window: int | None,
        fill: FillInputs,
        device: str,
    ) -> None:
        """``prompt_lens`` are of all rows."""
        (table,), self.device = rows.tables, device
        self._rows, self._all_prompt_lens, self._window = rows, prompt_lens, window
        self._fill = fill
        self.tokens = torch.zeros_like(prompt_lens)
        """The newest of each: int64 [n]."""
        self._positions = torch.zeros_like(prompt_lens)
        self._dropped = torch.zeros_like(prompt_lens)
        self._prompt_lens = torch.ones_like(prompt_lens)
        held = torch.zeros(table.shape[:3], dtype=torch.int64, device=table.device)
        tables, block = torch.zeros_like(table), rows.spec.block_tokens
        unread = tables, self._positions, self._positions  # nothing is logged
        self._where = RowTables(tables, held, self._positions, *unread, block, block)

    def begin(self, rows: IntArray, positions: IntArray, dropped: IntArray, most: int) -> None:
        """The next tokens of ``rows [n]`` are at ``positions [n]`` and behind them, ``most`` of a
        row; ``dropped [n]`` of those before are held no longer."""
        (table,), device, n = self._rows.tables, self.device, len(rows)
        held = positions - dropped
        used = -(-(int(held.max()) + most - 1) // self._rows.spec.block_tokens)
        at = to_device(rows, device)
        self._where.block_tables[:, :n, :, :used] = table[:, at, :, :used]
        self._where.kv_lens[:, :n] = to_device(held, device)[:, None]
        self._positions[:n] = to_device(positions, device)
        self._dropped[:n] = to_device(dropped, device)
        self._prompt_lens[:n] = self._all_prompt_lens[at]

    def decoding(
        self, size: int, logs_queries: bool, starts: IntArray | None = None
    ) -> ForwardBatch:
        """As ``InputBatch.decoding``."""
        assert not logs_queries, "no event observes a draft model"
        batch = step_buffers(self._where.block_tables, self._prompt_lens, size, starts)
        if self._window is None:
            return batch
        first = torch.zeros_like(batch.last)
        most_seen = self._window + int(np.diff(batch.starts).max())
        return replace(batch, windowed=replace(batch, first=first, most_seen=most_seen))

    def update_graph_inputs(
        self, batch: ForwardBatch, count: Tensor, chunks: Chunks | None = None
    ) -> Tensor:
        """As ``InputBatch.update_graph_inputs``."""
        size = len(batch.rows)
        fill_buffers(batch, self._fill, self._where, self._prompt_lens, count, chunks)
        if batch.windowed is not None and self._window is not None:
            assert batch.windowed.first is not None
            dropped = self._dropped[:size] if chunks is None else self._dropped[chunks.rows]
            places = batch.last[0, 0]  # all lanes hold the same
            batch.windowed.first.copy_(self._rows.first(places, dropped, self._window))
        return self.tokens[:size]
