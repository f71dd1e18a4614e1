"""Attention by gathering blocks into a dense buffer and calling torch's SDPA. Runs anywhere.

A row is a sequence or, under per-head tables, one KV head of it: with R tables per sequence the
batch simply has P * R rows of Hkv / R heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.attention.spans import Span, build_spans


class TorchAttention:
    """Keeps two growing buffers: fresh memory for every gather costs more than the copy."""

    replays = False
    reads_codes = False

    def __init__(self, scale: float, block_size: int, dtype: torch.dtype) -> None:
        self._scale = scale
        self._block_size = block_size
        self._dtype = dtype
        self._buffers: list[Tensor] = []

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """The batch in spans."""
        return _Planned(self, build_spans(batch, self._block_size, self._dtype))

    def attend(self, spans: list[Span], layer: int, q: Tensor, cache: LayerCache) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]."""
        keys, values, group = cache.keys_values(layer)
        if len(spans) == 1 and spans[0].tokens is None:
            return self._attend(spans[0], group, q[:, None], keys, values)[:, 0]
        out = torch.empty_like(q)
        for span in spans:
            if span.tokens is None:
                count = span.tables.shape[1]
                attended = self._attend(span, group, q[:count, None], keys, values)
                out[:count] = attended[:, 0]
                continue
            attended = self._attend(span, group, q[span.tokens], keys, values)
            if span.valid is None:
                out[span.tokens] = attended
            else:
                out[span.tokens[span.valid]] = attended[span.valid]
        return out

    def _attend(self, span: Span, group: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q: [P, Q, Hq, D]; keys, values: [num_blocks, B, Hb, D] -> [P, Q, Hq, D]."""
        tables, mask = span.tables[group], span.mask[group]
        chunks, width, heads, dim = q.shape
        rows = chunks * tables.shape[1]
        k, v = (self._gather(i, x, tables, rows) for i, x in enumerate((keys, values)))
        kv_heads = k.shape[1]
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

    def _gather(self, which: int, blocks: Tensor, tables: Tensor, rows: int) -> Tensor:
        """The rows' blocks in order: [rows, Hb, C * B, D], a view of a buffer."""
        _, size, heads, dim = blocks.shape
        count = tables.numel()
        if len(self._buffers) == which:
            self._buffers.append(blocks.new_empty(0))
        if self._buffers[which].numel() < count * size * heads * dim:
            self._buffers[which] = blocks.new_empty(2 * count * size * heads * dim)
        out = self._buffers[which][: count * size * heads * dim].view(count, size, heads, dim)
        torch.index_select(blocks, 0, tables.reshape(-1), out=out)
        return out.view(rows, -1, heads, dim).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Planned:
    backend: TorchAttention
    spans: list[Span]

    def forward(self, layer: int, q: Tensor, cache: LayerCache) -> Tensor:
        return self.backend.attend(self.spans, layer, q, cache)
