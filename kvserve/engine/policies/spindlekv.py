"""SpindleKV: evict by attention, most in deep layers; store likeness once (arXiv 2507.06517).

Budgets fall linearly from the first layer to the last (section 3, eq. 5, corrected: see
``linear_budgets``); inside a layer the choice is that of attention in a window. The second stage,
which replaces what is kept by references, is ``kvserve.kernels.codebook``.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import (
    Selection,
    UnevenPolicy,
    argument,
    exact_ratio,
    integers,
    number,
    odd,
    one_of,
    require,
)
from kvserve.engine.policies.budgeted import WindowVotes
from kvserve.engine.policies.budgets import layers, linear_budgets
from kvserve.engine.policies.scoring import POOLINGS, Observation, pool_scores
from kvserve.engine.policies.selection import uneven_best_and_newest
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.trigger import AtPrefillEnd, Budget, Trigger


@dataclass(frozen=True)
class SpindleKV(WindowVotes, UnevenPolicy):
    """Keep the prompt's entries that its last tokens attend to, ever fewer of them in deeper
    layers.

    ``ratio`` is the mean over layers, the window included, rounded down in each of them. The
    paper's second stage, references into a codebook, is not built into the cache yet: ``codebook``
    has to be False, and what remains is its eviction alone.
    """

    name: ClassVar[str] = "spindlekv"
    granularity: ClassVar[Granularity] = Granularity.LAYER
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; one event that scores window "
        "x prompt pairs per head; a block table per layer."
    )
    avoid: ClassVar[str] = (
        "Several questions about one prompt, where only the first one votes; models whose upper "
        "layers need as much as the lower ones."
    )

    ratio: float | str = argument(
        0.4,
        "fraction of the prompt's entries that is kept, mean over layers",
        note="above 0, at most 1",
    )
    codebook: bool = argument(
        False, "store references into a codebook; not built into the cache yet: True is refused"
    )
    window: int = argument(8, "newest entries: always kept, and their queries vote", least=1)
    beta: float = argument(
        0.05, "least share of its context that the last layer keeps", least=0, most=0.99
    )
    gqa: str = argument(
        "mean",
        "mean: one choice per KV head, the votes of its query heads averaged; repeat, each query "
        "head for itself, needs a mask per query head, which no attention backend has yet",
        choices=("mean",),
    )
    score_norm: str = argument(
        "window",
        "window: votes as they are; age: divided by an entry's distance from the prompt's end, as "
        "printed, which favours recent ones",
        choices=("window", "age"),
    )
    pooling: str = argument("none", "how votes are pooled", choices=POOLINGS)
    kernel_size: int = argument(7, "entries over which votes are pooled", least=1, note="odd")
    query_reduce: str = argument(
        "heads",
        "which queries are logged: all heads, or the mean over each GQA group",
        choices=("heads", "group_mean"),
    )

    def __post_init__(self) -> None:
        integers(self, window=1)
        odd("kernel_size", self.kernel_size)
        one_of("pooling", self.pooling, POOLINGS)
        one_of("score_norm", self.score_norm, ("window", "age"))
        one_of("query_reduce", self.query_reduce, ("heads", "group_mean"))
        built = "mean: repeat needs a mask per query head, which no attention backend has yet"
        require(self.gqa == "mean", "gqa", self.gqa, built)
        built = "False: storing references is not built yet, eviction alone is"
        require(self.codebook is False, "codebook", self.codebook, built)
        number("beta", self.beta, 0, 0.99)
        exact_ratio(self.ratio, "ratio")

    @property
    def trigger(self) -> Trigger:
        kept = Budget(ratio=exact_ratio(self.ratio, "ratio"), least=self.window)
        return AtPrefillEnd(kept, self.window)

    def layer_budgets(self, num_layers: int, length: int) -> list[int]:
        """Entries that each layer keeps of ``length``, the window aside."""
        ratio, beta = exact_ratio(self.ratio, "ratio"), Fraction(str(self.beta))
        return linear_budgets(length, self.window, ratio, beta, num_layers)

    def score(self, obs: Observation) -> Tensor:
        """Votes for the entries before the window: float32 [E, L, Hkv, n - window]."""
        votes = pool_scores(obs.causal("mean"), self.kernel_size, self.pooling)
        if self.score_norm == "age":
            context = votes.shape[-1]
            age = torch.arange(context + self.window, self.window, -1, device=votes.device)
            votes = votes / age
        return obs.there(votes)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best of each layer and the window: counts equal over heads."""
        budgets = layers(self.layer_budgets(scores.shape[1], length), scores)
        counts = (budgets + self.window).expand(scores.shape[:-1])
        return Selection(uneven_best_and_newest(scores, length, counts), counts)
