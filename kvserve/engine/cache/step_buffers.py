"""Buffers of a step that is captured or recorded: one token of each of the first rows, or a chunk.

They are at addresses that never change; each step fills them anew.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.kernels.decode_inputs import Chunks, DecodeInputs, FillInputs, RowTables
from kvserve.scheduler.arrays import IntArray


def step_buffers(
    tables: Tensor,
    prompt_lens: Tensor,
    size: int,
    starts: IntArray | None,
    *,
    logs_queries: bool = False,
) -> ForwardBatch:
    """For one token of each of the first ``size`` rows, or for chunks that begin at ``starts [size
    + 1]``. Tokens see nothing and are stored in the null block. ``prompt_lens`` are of all rows."""
    groups, _, heads, columns = tables.shape
    tokens = size if starts is None else int(starts[-1])
    slots = torch.zeros(groups, heads, tokens, dtype=torch.int64, device=tables.device)
    positions = slots.new_zeros(tokens)
    return ForwardBatch(
        positions=positions,
        prompt_lens=prompt_lens[:size] if starts is None else torch.ones_like(positions),
        slots=slots,
        query_slots=torch.zeros_like(slots) if logs_queries else None,
        last=torch.full_like(slots, -1),
        tables=tables,
        rows=np.arange(size),
        starts=np.arange(size + 1) if starts is None else starts,
        columns=np.full(size, columns),
        recent=torch.ones_like(positions) if logs_queries else None,
    )


def hide_tokens(batch: ForwardBatch, first: int) -> None:
    """Let the tokens from number ``first`` on see nothing, and be stored in the null block."""
    if first < len(batch.positions):
        for numbers in (batch.positions, batch.slots, batch.query_slots):
            if numbers is not None:
                numbers[..., first:] = 0
        batch.last[..., first:] = -1


def fill_buffers(
    batch: ForwardBatch,
    fill: FillInputs,
    where: RowTables,
    prompt_lens: Tensor,
    count: Tensor,
    chunks: Chunks | None,
) -> None:
    """Fill them for the first ``count []`` rows of ``where``, and count these rows' new entries."""
    logged = batch.query_slots, batch.recent
    fill(where, DecodeInputs(batch.positions, batch.slots, batch.last, *logged, chunks), count)
    if chunks is not None:
        torch.index_select(prompt_lens, 0, chunks.rows, out=batch.prompt_lens)
