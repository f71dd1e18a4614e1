"""ChunkKV: keep whole chunks of neighbouring entries (arXiv 2502.00299).

Attention of the last ``window`` queries is summed over chunks of ``chunk_size`` entries, and the
best chunks stay whole (section 3, Algorithm 1); a group of layers can share one layer's choice
(section 3, layer-wise index reuse). As kvserve runs it: the window is no part of any chunk, its
attention is a softmax probability, and the chunk on which the budget ends is cut, so that every
layer keeps exactly the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, require
from kvserve.engine.policies.budgeted import BudgetedPolicy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation, pool_scores
from kvserve.engine.policies.selection import chunks_and_newest, stable_order
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.budget import WholeChunks
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd


@dataclass(frozen=True)
class ChunkKV(BudgetedPolicy):
    """Keep the chunks of a prompt that its last tokens attend to; with trigger threshold, bound
    what a long generation holds.

    Use it where an answer needs whole phrases of a long prompt. A ratio is rounded to the nearest
    and leaves the window and one chunk at least. With trigger threshold the chunks are of cache
    entries, which may stand far apart in the text.
    """

    name: ClassVar[str] = "chunkkv"
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; one event that scores window "
        "x prompt pairs per head, in one layer of every reuse_layers."
    )
    avoid: ClassVar[str] = (
        "Single scattered tokens that matter by themselves; several questions about one prompt; "
        "with trigger prefill, long outputs."
    )
    nearest: ClassVar[bool] = True
    protects: ClassVar[str] = "window"

    chunk_size: int = argument(10, "c: entries per chunk, counted from the oldest one", least=1)
    window: int = common.window(8, "score")
    head_mode: str = argument(
        "shared",
        "shared: one choice for the KV heads of a layer; kv_head: each has its own",
        choices=("shared", "kv_head"),
    )
    chunk_reduce: str = argument(
        "sum",
        "over a chunk's scores; mean does not punish the last, short one",
        choices=("sum", "mean"),
        only_if=("align token", "chunk_size above 1"),
    )
    reuse_layers: int = argument(
        1,
        "neighbouring layers that use the choice of their first one",
        least=1,
        most=common.MOST_LAYERS,
    )
    align: str = argument(
        "token",
        "token: an exact budget, kept entries move to the front; block: whole blocks of each layer "
        "stay where they are, and only block tables change (trigger prefill, kv layout layer)",
        choices=("token", "block"),
        note="block needs a chunk_size of whole blocks",
    )
    pooling: str = common.pooling("none", "over scores before chunks are summed")
    kernel_size: int = common.kernel_size(5, "scores are")
    query_reduce: str = common.query_reduce()

    def check(self) -> None:
        aligned = self.align == "block"
        shared = not aligned or self.head_mode == "shared"
        require(shared, "align", self.align, "token where head_mode is kv_head")
        once = not aligned or self.trigger == "prefill"
        require(once, "align", self.align, "token where trigger is threshold")
        super().check()
        if self.budget is not None and self.threshold is not None:
            least = self.budget + self.chunk_size
            allowed = f"an integer of at least {least} (budget + {self.chunk_size})"
            require(self.threshold >= least, "threshold", self.threshold, allowed)

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        if self.align == "token":
            return self
        whole = self.chunk_size % block_size == 0
        allowed = f"a multiple of the block size ({block_size}) where align is block"
        require(whole, "chunk_size", self.chunk_size, allowed)
        return BlockChunkKV(**{f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def least(self) -> int:
        return self.window + self.chunk_size

    @property
    def least_in_words(self) -> str:
        return f"of at least {self.least} (window + chunk_size)"

    @property
    def couples_heads(self) -> bool:  # type: ignore[override]
        return self.head_mode == "shared"

    def score(self, obs: Observation) -> Tensor:
        """Attention to each entry before the window: float32 [E, L', Hkv, n - window]."""
        mass = obs.causal("sum")
        if self.couples_heads:
            mass = obs.all_heads(mass)
            mass = mass.sum(dim=-2, keepdim=True).expand_as(mass)
        return pool_scores(mass, self.kernel_size, self.pooling)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The best chunks, as many as fit, and the window: [E, L', Hkv, keep]."""
        return chunks_and_newest(scores, length, keep, self.chunk_size, self.chunk_reduce)


@dataclass(frozen=True)
class BlockChunkKV(ChunkKV):
    """``chunkkv`` with ``align=block``: each layer keeps its own whole blocks, equally many.

    Eviction edits block tables, and no entry moves.
    """

    granularity: ClassVar[Granularity] = Granularity.LAYER
    cuts_again: ClassVar[bool] = True
    keeps_blocks: ClassVar[bool] = True

    @property
    def event_trigger(self) -> Trigger:
        base = self.entries
        budget = WholeChunks(
            base.tokens, base.ratio, base.least, base.nearest, self.chunk_size, self.window
        )
        return AtPrefillEnd(budget, self.num_queries, self.protected)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The best whole chunks and the tail behind them: ``keep`` entries in every lane."""
        size = self.chunk_size
        chunks = scores.shape[-1] // size
        worth = scores[..., : chunks * size].reshape(*scores.shape[:-1], chunks, size).sum(dim=-1)
        tail = torch.arange(chunks * size, length, device=scores.device)
        best = stable_order(worth)[..., : (keep - len(tail)) // size].sort(dim=-1).values
        inside = torch.arange(size, device=scores.device)
        entries = (best[..., None] * size + inside).flatten(-2)
        return torch.cat([entries, tail.expand(*entries.shape[:-1], -1)], dim=-1)
