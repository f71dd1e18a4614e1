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

    def attend(
        self,
        spans: list[Span],
        layer: int,
        q: Tensor,
        cache: LayerCache,
        sums: Tensor | None = None,
    ) -> Tensor:
        """q: [T, Hq, D] -> [T, Hq, D]; ``sums`` [T, Hq] takes log-sum-exps."""
        keys, values, group = cache.keys_values(layer)
        if len(spans) == 1 and spans[0].tokens is None:
            own = None if sums is None else sums[:, None]
            return self._attend(spans[0], group, q[:, None], keys, values, own)[:, 0]
        out = torch.empty_like(q)
        for span in spans:
            at: Tensor | slice = slice(span.tables.shape[1])
            tokens = q[at, None] if span.tokens is None else q[span.tokens]
            own = None if sums is None else sums.new_empty(tokens.shape[:3])
            attended = self._attend(span, group, tokens, keys, values, own)
            found = (
                [(out, attended)]
                if own is None or sums is None
                else [
                    (out, attended),
                    (sums, own),
                ]
            )
            for whole, part in found:
                if span.tokens is None:
                    whole[at] = part[:, 0]
                elif span.valid is None:
                    whole[span.tokens] = part
                else:
                    whole[span.tokens[span.valid]] = part[span.valid]
        return out

    def _attend(
        self,
        span: Span,
        group: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        sums: Tensor | None,
    ) -> Tensor:
        """q: [P, Q, Hq, D]; keys, values: [num_blocks, B, Hb, D] -> [P, Q, Hq, D]."""
        tables, mask = span.tables[group], span.mask[group]
        chunks, width, heads, dim = q.shape
        rows = chunks * tables.shape[1]
        k, v = (self._gather(i, x, tables, rows) for i, x in enumerate((keys, values)))
        kv_heads = k.shape[1]
        if sums is not None:
            sums.copy_(self._log_sums(q, k, mask, tables.shape[1]))
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

    def _log_sums(self, q: Tensor, k: Tensor, mask: Tensor, per_row: int) -> Tensor:
        """float32 [P, Q, Hq]; SDPA keeps them to itself, so the logits are made once more."""
        chunks, width = q.shape[:2]
        kv_heads = k.shape[1]
        # [P * R, Hb, G * Q, D]
        folded = q.view(chunks, width, per_row, kv_heads, -1, q.shape[-1]).permute(0, 2, 3, 4, 1, 5)
        logits = folded.flatten(3, 4).flatten(0, 1).float() @ k.float().transpose(-1, -2)
        logits = logits.unflatten(2, (-1, width)) * self._scale + mask[:, :, None].float()
        found = logits.logsumexp(dim=-1).unflatten(0, (chunks, per_row))
        return found.permute(0, 4, 1, 2, 3).flatten(2)

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

    def forward(
        self, layer: int, q: Tensor, cache: LayerCache, sums: Tensor | None = None
    ) -> Tensor:
        return self.backend.attend(self.spans, layer, q, cache, sums)
