"""Attention by gathering blocks into a dense buffer and calling torch's SDPA. Runs anywhere.

A row is a sequence or, under per-head tables, one KV head of it: with R tables per sequence the
batch simply has P * R rows of Hkv / R heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.engine.attention.base import (
    BatchAttention,
    ForwardBatch,
    LayerCache,
    RowRemainders,
    wanted_shares,
)
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.attend.query_segments import Shares
from kvserve.kernels.store.entries import Entries
from kvserve.kernels.store.remainder import Remainder, capped, logits_with
from kvserve.scheduler.arrays import IntArray


class TorchAttention:
    """Keeps two growing buffers: fresh memory for every gather costs more than the copy."""

    replays = replays_chunks = False
    reads_remainders = True

    def __init__(
        self, scale: float, block_size: int, dtype: torch.dtype, soft_cap: float = 0.0
    ) -> None:
        self._scale = scale
        self._soft_cap = soft_cap
        self._block_size = block_size
        self._dtype = dtype
        self._buffers: list[Tensor] = []

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """One span per size class of chunks and caches, so short ones are not padded to long
        ones."""
        lengths, remainders = np.diff(batch.starts), batch.remainders
        classes = _size_class(lengths, least=1) * 64 + _size_class(batch.columns, least=8)
        spans = [
            _span(batch, np.flatnonzero(classes == size), lengths, self._block_size, self._dtype)
            for size in np.unique(classes)
        ]
        if remainders is not None and not remainders.used:
            remainders = None  # they want a mask for each head
        newest = batch.newest  # of spans, entries of both are counted together
        recent = (newest or batch).recent
        return partial(self._forward, spans, recent, remainders)

    def _forward(
        self,
        spans: list[Span],
        recent: Tensor | None,
        remainders: RowRemainders | None,
        layer: int,
        q: Tensor,
        cache: LayerCache,
        shares: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        keys, values, group = cache.keys_values(layer)
        wanted = wanted_shares(shares, recent)
        remainder = None if remainders is None else remainders.layer(layer)
        newest = None
        if spans and spans[0].newest is not None:
            newest = cache.newest_keys_values(layer)[:2]
        blocks = keys, values, newest, remainder, sinks
        if len(spans) == 1 and spans[0].tokens is None:
            return self._attend(spans[0], group, q[:, None], *blocks, wanted)[:, 0]
        out = torch.empty_like(q)
        for span in spans:
            if span.tokens is None:
                at = slice(span.tables.shape[1])
                own = None if wanted is None else Shares(wanted.out[at], wanted.recent[at])
                out[at] = self._attend(span, group, q[at, None], *blocks, own)[:, 0]
                continue
            own = None
            if wanted is not None:
                recent = wanted.recent[span.tokens]
                own = Shares(wanted.out.new_empty(*recent.shape, q.shape[1]), recent)
            attended = self._attend(span, group, q[span.tokens], *blocks, own)
            valid = slice(None) if span.valid is None else span.valid
            out[span.tokens[valid]] = attended[valid]
            if wanted is not None and own is not None:
                wanted.out[span.tokens[valid]] = own.out[valid]
        return out

    def _attend(
        self,
        span: Span,
        group: int,
        q: Tensor,
        keys: Entries,
        values: Entries,
        newest: tuple[Tensor, Tensor] | None,
        remainder: Remainder | None,
        sinks: Tensor | None,
        shares: Shares | None,
    ) -> Tensor:
        """q: [P, Q, Hq, D]; keys, values: [num_blocks, B, Hb, D] -> [P, Q, Hq, D]."""
        tables, mask = span.tables[group], span.mask[group]
        chunks, width, heads, dim = q.shape
        rows = chunks * tables.shape[1]
        k, v = (self._gather(i, x, tables, rows, q.dtype) for i, x in enumerate((keys, values)))
        for x in (k, v):  # unseen slots may hold NaN, which no mask hides: 0 * NaN is NaN
            x.masked_fill_(span.unseen[group], 0.0)
        if newest is not None and span.newest is not None:
            more = span.newest.tables[group]
            exact = [self._gather(i, x, more, rows, q.dtype) for i, x in enumerate(newest)]
            for x in exact:
                x.masked_fill_(span.newest.unseen[group], 0.0)
            k, v = (torch.cat(both, dim=2) for both in zip((k, v), exact, strict=True))
            mask = torch.cat([mask, span.newest.mask[group]], dim=-1)
        kv_heads = k.shape[1]
        own = None
        if remainder is not None:
            lost = (x.flatten(0, 1).unflatten(0, (rows, kv_heads)) for x in remainder.at(span.rows))
            own = Remainder(*lost)
        if shares is not None:
            recent = shares.recent.view(chunks, width)
            found = self._shares(q, k, mask, tables.shape[1], recent, own, sinks)
            shares.out.copy_(found.view_as(shares.out))
        if own is not None:
            by_hand = sinks is not None or self._soft_cap
            repeated = 1 if width == 1 or by_hand else heads // (kv_heads * tables.shape[1])
            k, v, mask = _with_remainder(k, v, mask, own, repeated)
        if sinks is not None or self._soft_cap:
            return self._by_hand(q, k, v, mask, tables.shape[1], sinks)
        if width == 1:
            # The query heads of a KV head become its queries: no key is repeated or copied.
            q = q.reshape(rows, kv_heads, heads // (kv_heads * tables.shape[1]), dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale)
            return out.reshape(chunks, 1, heads, dim)
        q = q.unflatten(2, (tables.shape[1], -1)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self._scale, enable_gqa=True
        )
        return out.unflatten(0, (chunks, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)

    def _by_hand(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, per_row: int, sinks: Tensor | None
    ) -> Tensor:
        """What SDPA cannot do: logits that are capped, and ``sinks [Hq]`` that carry no value."""
        folded = _folded(q, per_row, k.shape[1])
        logits = self._logits(folded, k, q.shape[1]) + mask[:, :, None].float()
        if sinks is not None:
            logits = torch.cat([logits, self._sink_column(sinks, logits, per_row)], dim=-1)
        # A query that sees nothing but its sink gets nothing.
        weights = logits.softmax(dim=-1).nan_to_num(0.0)[..., : k.shape[2]]
        out = (weights.flatten(2, 3) @ v.float()).unflatten(2, (-1, q.shape[1]))
        out = out.unflatten(0, (len(q), per_row)).permute(0, 4, 1, 2, 3, 5)
        return out.reshape(q.shape).to(q.dtype)

    def _logits(self, folded: Tensor, k: Tensor, width: int) -> Tensor:
        """float32 [P * R, Hb, G, Q, n] of ``_folded`` queries."""
        logits = folded.flatten(3, 4).flatten(0, 1).float() @ k.float().transpose(-1, -2)
        return capped(logits.unflatten(2, (-1, width)) * self._scale, self._soft_cap)

    def _sink_column(self, sinks: Tensor, logits: Tensor, per_row: int) -> Tensor:
        """One more logit of each query: [P * R, Hb, G, Q, 1]."""
        rows, kv_heads, group = logits.shape[:3]
        own = sinks.view(per_row, kv_heads, group).repeat(rows // per_row, 1, 1)
        return own[..., None, None].expand(*logits.shape[:4], 1)

    def _shares(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor,
        per_row: int,
        recent: Tensor,
        remainder: Remainder | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """float32 [P, Q, Hq]: logarithms of what the newest ``recent [P, Q]`` entries got.

        SDPA does not return its sums, so the logits are computed again.
        """
        chunks, width = q.shape[:2]
        folded = _folded(q, per_row, k.shape[1])
        logits = self._logits(folded, k, width) + mask[:, :, None].float()
        seen = mask[:, 0] == 0  # [P * R, Q, n], oldest first
        later = seen.sum(dim=-1, keepdim=True) - seen.cumsum(dim=-1)
        older = later >= recent.repeat_interleave(per_row, dim=0)[..., None]
        newest = logits.masked_fill(older[:, None, None], -torch.inf).logsumexp(dim=-1)
        if remainder is not None:
            heads = folded.flatten(0, 1).flatten(1, 2)
            logits = logits_with(logits, heads, remainder, self._scale, self._soft_cap)
        if sinks is not None:
            logits = torch.cat([logits, self._sink_column(sinks, logits, per_row)], dim=-1)
        found = (newest - logits.logsumexp(dim=-1)).nan_to_num(0.0, neginf=-torch.inf)
        return found.unflatten(0, (chunks, per_row)).permute(0, 4, 1, 2, 3).flatten(2)

    def _gather(
        self, which: int, blocks: Entries, tables: Tensor, rows: int, dtype: torch.dtype
    ) -> Tensor:
        """The rows' blocks in order: [rows, Hb, C * B, D], a view of a buffer; levels widened."""
        _, size, heads, dim = blocks.shape
        count = tables.numel()
        if not isinstance(blocks, Tensor):
            found = blocks.select(0, tables.reshape(-1)).widened(dtype)
            return found.reshape(rows, -1, heads, dim).transpose(1, 2)
        if len(self._buffers) == which:
            self._buffers.append(blocks.new_empty(0))
        if self._buffers[which].numel() < count * size * heads * dim:
            self._buffers[which] = blocks.new_empty(2 * count * size * heads * dim)
        out = self._buffers[which][: count * size * heads * dim].view(count, size, heads, dim)
        torch.index_select(blocks, 0, tables.reshape(-1), out=out)
        return out.view(rows, -1, heads, dim).transpose(1, 2)


def _folded(q: Tensor, per_row: int, kv_heads: int) -> Tensor:
    """Queries [P, Q, Hq, D] by their KV heads: [P, R, Hb, G, Q, D]."""
    chunks, width, _, dim = q.shape
    return q.reshape(chunks, width, per_row, kv_heads, -1, dim).permute(0, 2, 3, 4, 1, 5)


def _with_remainder(
    k: Tensor, v: Tensor, mask: Tensor, remainder: Remainder, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One more entry of each row and KV head, and its bias in the mask of its ``group`` heads."""
    keys, values = remainder.numbers()
    k, v = (
        torch.cat([x, more.to(x.dtype)[:, :, None]], dim=2) for x, more in ((k, keys), (v, values))
    )
    bias = remainder.bias.repeat_interleave(group, dim=1)[..., None, None]
    shape = *bias.shape[:2], mask.shape[2], -1
    return k, v, torch.cat([mask.float().expand(shape), bias.expand(*shape[:3], 1)], dim=-1)


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
