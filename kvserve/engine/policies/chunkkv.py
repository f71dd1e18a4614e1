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

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, integers, odd, one_of, require
from kvserve.engine.policies.budgeted import BudgetedPolicy, WindowVotes, check_threshold
from kvserve.engine.policies.scoring import POOLINGS, Observation, pool_scores
from kvserve.engine.policies.selection import chunks_and_newest


@dataclass(frozen=True)
class ChunkKV(WindowVotes, BudgetedPolicy):
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

    chunk_size: int = argument(10, "c: entries per chunk, counted from the oldest one", least=1)
    window: int = argument(8, "newest entries: always kept, and their queries score", least=1)
    head_mode: str = argument(
        "shared",
        "shared: one choice for the KV heads of a layer; kv_head: each has its own",
        choices=("shared", "kv_head"),
    )
    chunk_reduce: str = argument(
        "sum",
        "over a chunk's scores; mean does not punish the last, short one",
        choices=("sum", "mean"),
    )
    reuse_layers: int = argument(
        1, "neighbouring layers that use the choice of their first one", least=1
    )
    align: str = argument(
        "token",
        "token: an exact budget, kept entries move to the front; block: whole blocks of each layer "
        "stay where they are, and only block tables change (trigger prefill, kv layout layer)",
        choices=("token", "block"),
        note="block needs a chunk_size of whole blocks",
    )
    pooling: str = argument("none", "over scores before chunks are summed", choices=POOLINGS)
    kernel_size: int = argument(5, "entries over which scores are pooled", least=1, note="odd")
    query_reduce: str = argument(
        "heads",
        "which queries are logged: all heads, or the mean over each GQA group",
        choices=("heads", "group_mean"),
    )

    def __post_init__(self) -> None:
        integers(self, window=1, chunk_size=1, reuse_layers=1)
        odd("kernel_size", self.kernel_size)
        one_of("pooling", self.pooling, POOLINGS)
        one_of("head_mode", self.head_mode, ("shared", "kv_head"))
        one_of("chunk_reduce", self.chunk_reduce, ("sum", "mean"))
        one_of("query_reduce", self.query_reduce, ("heads", "group_mean"))
        one_of("align", self.align, ("token", "block"))
        aligned = self.align == "block"
        shared = not aligned or self.head_mode == "shared"
        require(shared, "align", self.align, "token where head_mode is kv_head")
        once = not aligned or self.when == "prefill"
        require(once, "align", self.align, "token where trigger is threshold")
        self.check_budget(f"of at least {self.least} (window + chunk_size)")
        if self.budget is not None:
            check_threshold(self.threshold, self.budget, gap=self.chunk_size)

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        if self.align == "token":
            return self
        from kvserve.engine.policies.chunkkv_blocks import BlockChunkKV  # a subclass of this class

        whole = self.chunk_size % block_size == 0
        allowed = f"a multiple of the block size ({block_size}) where align is block"
        require(whole, "chunk_size", self.chunk_size, allowed)
        return BlockChunkKV(**{f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def least(self) -> int:
        return self.window + self.chunk_size

    def leaders(self, num_layers: int) -> list[int]:
        """The first layer of each group of ``reuse_layers``."""
        return [layer - layer % self.reuse_layers for layer in range(num_layers)]

    @property
    def couples_heads(self) -> bool:
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
