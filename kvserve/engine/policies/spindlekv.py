"""SpindleKV: evict by attention, most in deep layers; store likeness once (arXiv 2507.06517).

Budgets fall linearly from the first layer to the last (section 3, eq. 5, corrected: see
``linear_budgets``); inside a layer the choice is that of attention in a window. What is kept
becomes references into a codebook of its layer and KV head
(``kvserve.kernels.score.codebook``), and so do generated tokens, a few blocks at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, Selection, argument, exact_ratio, require
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.budgets import layers, linear_budgets
from kvserve.engine.policies.scoring import Observation, pool_scores
from kvserve.engine.policies.selection import uneven_best_and_newest
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.periodic import QuantizeTrigger
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd

_CODED, _EVICTS = ("codebook true",), ("ratio below 1",)


@dataclass(frozen=True)
class SpindleKV(Policy):
    """Keep the prompt's entries that its last tokens attend to, ever fewer of them in deeper
    layers, and store what is alike once.

    ``ratio`` is the mean over layers, the window included, rounded down in each of them; 1 evicts
    nothing. How much codes save depends on the text: ``usage.kv_cache_details`` reports it. Without
    ``codebook`` entries are only evicted, with a table per layer.
    """

    name: ClassVar[str] = "spindlekv"
    granularity: ClassVar[Granularity] = Granularity.HEAD
    protects: ClassVar[str] = "window"
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; an event that compares all "
        "kept entries of a head with each other, and one per flush_every tokens; attention that "
        "decodes entries as it reads them (--attention-backend cpu or triton)."
    )
    avoid: ClassVar[str] = (
        "Where speed counts more than memory; models with few layers; several questions about one "
        "prompt, where only the first one votes; large blocks."
    )

    ratio: float | str = common.kept_ratio(
        0.4, "fraction of the prompt's entries that is kept, mean over layers"
    )
    codebook: bool = argument(True, "store what is kept as references into a codebook")
    theta_k: float = argument(
        0.98,
        "cosine above which one key, before RoPE, stands for another",
        least=0.01,
        most=0.9999,
        only_if=_CODED,
    )
    theta_v: float = argument(
        0.95,
        "cosine above which one value stands for another",
        least=0.01,
        most=0.9999,
        only_if=_CODED,
    )
    flush_every: int = argument(
        64, "generated tokens that are coded together", least=1, only_if=_CODED, note="whole blocks"
    )
    raw_fallback: bool = argument(
        True, "leave a layer's head as it is if its codes would not save a block", only_if=_CODED
    )
    window: int = common.window(16, note="at least a block with a codebook")
    beta: float = argument(
        0.05,
        "least share of its context that the last layer keeps",
        least=0,
        most=0.99,
        only_if=_EVICTS,
    )
    score_norm: str = argument(
        "window",
        "window: votes as they are; age: divided by an entry's distance from the prompt's end, as "
        "printed, which favours recent ones",
        choices=("window", "age"),
        only_if=_EVICTS,
    )
    pooling: str = common.pooling("none", only_if=("kernel_size above 1", *_EVICTS))
    kernel_size: int = common.kernel_size(7, only_if=("pooling avg or max", *_EVICTS))
    query_reduce: str = common.query_reduce()

    def for_model(self, num_layers: int, block_size: int) -> SpindleKV:
        """This policy or, without a codebook, ``SpindleEviction``; codes come in whole blocks."""
        if not self.codebook:
            return SpindleEviction(**{f.name: getattr(self, f.name) for f in fields(SpindleKV)})
        whole = f"a multiple of the block size ({block_size}), since codes come in whole blocks"
        require(self.flush_every % block_size == 0, "flush_every", self.flush_every, whole)
        # Entries that do not fill a block stay raw, and have to be the newest tokens.
        least = f"at least the block size ({block_size}) where there is a codebook"
        require(self.window >= block_size, "window", self.window, least)
        return self

    @property
    def entries(self) -> Budget:
        """Entries kept of a prompt, on average."""
        return Budget(ratio=exact_ratio(self.ratio, "ratio"), least=self.window)

    @property
    def event_trigger(self) -> Trigger:
        queries = 0 if exact_ratio(self.ratio, "ratio") == 1 else self.window
        return QuantizeTrigger(self.entries, queries, self.flush_every, self.raw_fallback)

    def layer_budgets(self, num_layers: int, length: int) -> list[int]:
        """Entries that each layer keeps of ``length``, the window aside."""
        ratio, beta = exact_ratio(self.ratio, "ratio"), Fraction(str(self.beta))
        return linear_budgets(length, self.window, ratio, beta, num_layers)

    def score(self, obs: Observation) -> Tensor:
        """Votes for the entries before the window: float32 [E, L, Hkv, n - window]."""
        if not obs.queries.shape[-2]:  # nothing is to be evicted
            return obs.keys.new_zeros(*obs.keys.shape[:3], 0)
        votes = pool_scores(obs.causal("mean"), self.kernel_size, self.pooling)
        if self.score_norm == "age":
            context = votes.shape[-1]
            age = torch.arange(context + self.window, self.window, -1, device=votes.device)
            votes = votes / age
        return obs.there(votes)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best of each layer, and the window. Counts are equal over heads."""
        context = scores.shape[-1]
        budgets = layers(self.layer_budgets(scores.shape[1], length), scores).clamp(max=context)
        counts = (budgets + length - context).expand(scores.shape[:-1])
        return Selection(uneven_best_and_newest(scores, length, counts), counts)


@dataclass(frozen=True)
class SpindleEviction(SpindleKV):
    """SpindleKV without its codebook."""

    granularity: ClassVar[Granularity] = Granularity.LAYER

    @property
    def event_trigger(self) -> Trigger:
        return AtPrefillEnd(self.entries, self.window)
