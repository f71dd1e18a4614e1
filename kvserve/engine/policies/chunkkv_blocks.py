"""ChunkKV on whole blocks: eviction edits block tables, and no entry moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Selection, UnevenPolicy
from kvserve.engine.policies.chunkkv import ChunkKV
from kvserve.engine.policies.selection import stable_order
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.trigger import AtPrefillEnd, Trigger, WholeChunks


@dataclass(frozen=True)
class BlockChunkKV(ChunkKV, UnevenPolicy):
    """``chunkkv`` with ``align=block``: each layer keeps its own blocks, equally many."""

    granularity: ClassVar[Granularity] = Granularity.LAYER
    keeps_blocks: ClassVar[bool] = True

    @property
    def trigger(self) -> Trigger:
        base = self.entries
        budget = WholeChunks(
            base.tokens, base.ratio, base.least, base.nearest, self.chunk_size, self.window
        )
        return AtPrefillEnd(budget, self.num_queries)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best whole chunks and the tail behind them: ``keep`` entries in every lane."""
        size = self.chunk_size
        chunks = scores.shape[-1] // size
        worth = scores[..., : chunks * size].reshape(*scores.shape[:-1], chunks, size).sum(dim=-1)
        tail = torch.arange(chunks * size, length, device=scores.device)
        best = stable_order(worth)[..., : (keep - len(tail)) // size].sort(dim=-1).values
        inside = torch.arange(size, device=scores.device)
        entries = (best[..., None] * size + inside).flatten(-2)
        indices = torch.cat([entries, tail.expand(*entries.shape[:-1], -1)], dim=-1)
        return Selection(indices, torch.full_like(indices[..., 0], keep))
