"""DynamicKV: layers share a budget by what a prompt's attention says (arXiv 2412.14838).

The best scores of all layers are taken together, and each layer gets its part of the budget in
proportion to how many of them it has. This is repeated after every ``interval`` layers, and no
round raises a layer's budget again (Algorithm 1). Budgets are the exact proportions that the
paper's formulas come to; inside a layer the choice is SnapKV's.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Selection, argument
from kvserve.engine.policies.budgeted import PromptPolicy
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation, pool_scores
from kvserve.engine.policies.selection import uneven_best_and_newest
from kvserve.scheduler.layout import Granularity

_FINITE = 1e6


@dataclass(frozen=True)
class DynamicKV(PromptPolicy):
    """Keep the prompt's entries that its last tokens attend to, more of them in the layers whose
    attention stands out for this prompt.

    ``budget`` is the mean over layers; they may hold less if an earlier round dropped entries that
    a later one would have kept. A ratio is rounded to the nearest and leaves the window and one
    more entry at least. Prompts not longer than the budget stay as they are.
    """

    name: ClassVar[str] = "dynamickv"
    granularity: ClassVar[Granularity] = Granularity.LAYER
    couples_heads: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; one event that scores window "
        "x prompt pairs per head, then one selection over all scores per interval layers; a block "
        "table per layer."
    )
    avoid: ClassVar[str] = (
        "Several questions about one prompt, where only the first one votes; prompts not much "
        "longer than budget; long outputs."
    )
    nearest: ClassVar[bool] = True
    protects: ClassVar[str] = "window"

    ratio: float | str | None = common.kept_ratio(
        None, "fraction of the prompt's entries that is kept"
    )
    window: int = common.window(8)
    kernel_size: int = common.kernel_size(7, only_if=())
    pooling: str = common.pooling("avg", choices=("avg", "max"))
    gqa_reduce: str = common.gqa_reduce("mean", ("mean", "max"))
    max_ratio: float = argument(
        10, "most that a layer keeps, in mean budgets (the window aside)", least=1, most=_FINITE
    )
    interval: int = argument(
        4,
        "layers between two updates of the budgets; from the number of layers on, one",
        least=1,
        most=common.MOST_LAYERS,
    )
    rounding: str = argument(
        "exact",
        "exact: floors of the exact proportions; released: the authors' code, in coarse steps "
        "whose loss goes to the last layer (more, the fewer KV heads there are)",
        choices=("exact", "released"),
    )
    query_reduce: str = common.query_reduce()

    def score(self, obs: Observation) -> Tensor:
        """Pooled votes for the entries before the window: float32 [E, L, Hkv, n - window]."""
        votes = pool_scores(obs.causal(self.gqa_reduce), self.kernel_size, self.pooling)
        return obs.all_heads(votes)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best of each layer and the window: counts equal over heads."""
        budgets = self.layer_budgets(scores, keep - self.window) + self.window
        counts = budgets[..., None].expand(scores.shape[:-1])
        return Selection(uneven_best_and_newest(scores, length, counts), counts)

    def layer_budgets(self, scores: Tensor, base: int) -> Tensor:
        """Entries before the window that each layer keeps: int64 [E, L].

        scores: [E, L, H, n]; ``base``, below n, is the mean budget. The layers that are done share
        the budget of all layers, so the first ones keep up to the cap until others join.
        """
        num_layers, most = scores.shape[1], scores.shape[-1]
        cap = min(int(Fraction(str(self.max_ratio)) * base), most)
        held = torch.full(scores.shape[:2], cap, dtype=torch.int64, device=scores.device)
        for done in [*range(self.interval, num_layers, self.interval), num_layers]:
            best = best_per_layer(scores[:, :done], base * scores.shape[2] * done)
            shares = self.shares(best, base, cap, num_layers)
            held[:, :done] = held[:, :done].minimum(shares)
        return held

    def shares(self, best: Tensor, base: int, cap: int, num_layers: int) -> Tensor:
        """The whole budget, shared by the layers that are done: int64, the shape of ``best``.

        best: [E, l], how many of the best scores each of them has. What rounding leaves goes to the
        newest layer.
        """
        total, done = base * num_layers, best.shape[1]
        if self.rounding == "released":
            heads_base = best.sum(dim=-1) // done
            best = best // done
            if done == num_layers:
                best[:, -1] += heads_base - best.sum(dim=-1)
            # If all are 0, the authors' code divides by 0; here the newest layer gets all.
            best = cap * best // best.sum(dim=-1, keepdim=True).clamp(min=1)
        shares = total * best // best.sum(dim=-1, keepdim=True).clamp(min=1)
        shares[:, -1] += total - shares.sum(dim=-1)
        return shares


def best_per_layer(scores: Tensor, count: int) -> Tensor:
    """How many of the ``count`` best of all scores each layer has: int64 [E, L].

    scores: float32 [E, L, H, n]. Among equal scores those of lower layers come first.
    """
    flat = scores.flatten(1)
    least = flat.kthvalue(flat.shape[-1] - count + 1, dim=-1).values[:, None]
    per_layer = scores.flatten(2)
    above = (per_layer > least[..., None]).sum(dim=-1)
    equal = (per_layer == least[..., None]).sum(dim=-1)
    room = count - above.sum(dim=-1, keepdim=True) - (equal.cumsum(dim=-1) - equal)
    return above + room.clamp(min=0).minimum(equal)
