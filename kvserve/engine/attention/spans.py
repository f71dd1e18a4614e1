"""Chunks of similar size as padded batches with masks, for attention without paging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.device.transfer import to_device
from kvserve.scheduler.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Span:
    """P chunks of at most Q tokens each that attend together, padded to one shape.

    ``tokens [P, Q]`` are places in the batch (``None``: tokens 0..P-1, Q = 1); ``valid [P, Q]``
    says which are real (``None``: all). ``rows [P]`` are the chunks' own. ``tables [LG, P, R, C]``
    are the block tables, cut to the C columns in use. ``mask [LG, P * R, 1, Q, C * B]`` is added to
    the logits: 0 or -inf. ``newest`` is the same of entries held as they were computed.
    """

    tokens: Tensor | None
    valid: Tensor | None
    rows: Tensor
    tables: Tensor
    mask: Tensor
    unseen: Tensor
    newest: Span | None


def build_spans(batch: ForwardBatch, block_size: int, dtype: torch.dtype) -> list[Span]:
    """One span per size class of chunks and caches, so short ones are not padded to long ones."""
    lengths = np.diff(batch.starts)
    classes = _size_class(lengths, least=1) * 64 + _size_class(batch.columns, least=8)
    return [
        _span(batch, np.flatnonzero(classes == size), lengths, block_size, dtype)
        for size in np.unique(classes)
    ]


def _span(
    batch: ForwardBatch, at: IntArray, lengths: IntArray, block_size: int, dtype: torch.dtype
) -> Span:
    """The chunks ``at`` as one span."""
    device, block_size = batch.tables.device, batch.block_tokens or block_size
    width, columns = int(lengths[at].max()), int(batch.columns[at].max())
    place = np.minimum(np.arange(width), lengths[at][:, None] - 1)
    tokens = to_device(batch.starts[at][:, None] + place, device)
    rows = to_device(batch.rows[at], device)
    last = batch.last[..., tokens].transpose(1, 2).flatten(1, 2)
    tables, entries = batch.tables[:, rows], torch.arange(columns * block_size, device=device)
    seen = torch.zeros((), dtype=dtype, device=device)
    if batch.first is None:
        tables, hidden = tables[..., :columns].contiguous(), entries > last[..., None]
    else:  # blocks behind the windows are not gathered
        first = batch.first[..., tokens].transpose(1, 2)
        if batch.most_seen is not None:
            columns = min(columns, batch.most_seen // block_size + 2)
        begin = first.amin(dim=-1, keepdim=True) // block_size
        chosen = begin + torch.arange(columns, device=device)
        tables = tables.gather(3, chosen.clamp(max=tables.shape[3] - 1))
        entries = begin * block_size + torch.arange(columns * block_size, device=device)
        entries = entries.flatten(1, 2)[:, :, None]
        hidden = (entries > last[..., None]) | (entries < first.flatten(1, 2)[..., None])
    mask = torch.where(hidden, -torch.inf, seen)[:, :, None]
    unseen = hidden.all(dim=2)[:, :, None, :, None]
    valid = None
    if lengths[at].min() < width:
        valid = to_device(np.arange(width) < lengths[at][:, None], device, torch.bool)
    leading = width == 1 and at[-1] == len(at) - 1
    newest = None if batch.newest is None else _span(batch.newest, at, lengths, block_size, dtype)
    return Span(None if leading else tokens, valid, rows, tables, mask, unseen, newest)


def _size_class(sizes: IntArray, least: int) -> IntArray:
    """0 up to ``least``, then one class per doubling."""
    classes: IntArray = np.ceil(np.log2(np.maximum(sizes, least) / least)).astype(np.int64)
    return classes
