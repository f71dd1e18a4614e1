"""WindowKV: keep whole windows of neighbouring entries, chosen as the task wants it (arXiv
2503.17922).

A window is scored by all its entries if the task is to locate an answer, and by its best ones if
the task is to aggregate. The first layer of each group chooses for the others, and budgets fall
from group to group (section 3). Where paper and code disagree, the code's budgets and the paper's
tasks are the default. As kvserve runs it, ``budget`` counts the observation window, which the paper
adds on top.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, Selection, argument, require
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.budgets import group_budgets, layers
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import uneven_chunks_and_newest
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd

TASKS = ("localization", "aggregation")
_WINDOWS = {"localization": 16, "aggregation": 32}
_MOST = 1e6


@dataclass(frozen=True)
class WindowKV(Policy):
    """Keep those windows of a prompt that its last tokens attend to, alike in neighbouring layers,
    and more of them in lower ones.

    ``budget`` is the mean over layers before budgets are rounded to whole windows. Rounding keeps
    up to ``chunk_size`` entries more or less in a layer, so the mean held may exceed ``budget`` by
    up to a window (by 12 entries of 60, say). If the budget is small, the uppermost layers may keep
    only the newest entries.
    """

    name: ClassVar[str] = "windowkv"
    granularity: ClassVar[Granularity] = Granularity.LAYER
    couples_heads: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "The prompt's blocks until its end; a log of window queries; one event that scores window "
        "x prompt pairs per head, in one layer of every reuse_layers; a block table per layer."
    )
    avoid: ClassVar[str] = (
        "Single scattered tokens that matter by themselves; several questions about one prompt; "
        "long outputs."
    )
    needs: ClassVar[tuple[str, ...]] = ("budget",)

    budget: int | None = common.required_budget(
        "mean entries kept per head, the newest ones among them (the paper's KV size + window)",
        least=2,
        note="above window",
    )
    task: str = argument(
        "localization",
        "localization: windows count by all their entries; aggregation: by the best ones",
        choices=TASKS,
    )
    window: int | None = argument(
        None,
        "alpha: newest entries, always kept, and their queries score (default 16 for "
        "localization, 32 for aggregation)",
        least=1,
    )
    chunk_size: int = argument(
        16, "omega: entries per window that is kept or not, from the oldest on", least=1
    )
    best: int | None = argument(
        None,
        "p: entries by which a window counts (default: all for localization, half for aggregation)",
        least=1,
        at_most="chunk_size",
        only_if=("chunk_size above 1",),
    )
    reuse_layers: int | None = argument(
        None,
        "gamma: layers in a group (default: the divisor of the number of layers nearest to a "
        "quarter of it)",
        least=1,
        most=common.MOST_LAYERS,
        note="divides the number of layers",
    )
    pyramid: float = argument(
        14, "lambda: the larger, the less the last group keeps", least=1e-3, most=_MOST
    )
    rule: str = argument(
        "released",
        "the last group's mean, the window aside, is 1/lambda of the mean (equations), or "
        "gamma/lambda (released, flatter)",
        choices=("released", "equations"),
        only_if=("reuse_layers above 1",),
    )
    query_reduce: str = common.query_reduce()
    remainder: str = common.remainder()

    def check(self) -> None:
        ok = self.budget is not None and self.budget > self.protected
        require(ok, "budget", self.budget, f"an integer above window ({self.protected})")
        tells = self.task == "localization" or None in (self.window, self.best)
        require(tells, "task", self.task, "left out where window and best are given")

    @property
    def protected(self) -> int:
        return _WINDOWS[self.task] if self.window is None else self.window

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        size = self.reuse_layers or _nearest_divisor(num_layers)
        divides = num_layers % size == 0
        require(divides, "reuse_layers", size, f"a divisor of the model's {num_layers} layers")
        policy = replace(self, reuse_layers=size)
        if size == num_layers:  # a pyramid of one group is flat
            flat = self.pyramid in (type(self).pyramid, size) and self.rule == "released"
            fewer = f"below the model's {num_layers} layers where pyramid or rule is given"
            require(flat, "reuse_layers", size, fewer)
            return replace(policy, pyramid=float(size), rule="released")
        most = f"at most {2 * self.pyramid:g} (twice pyramid): the first group would keep nothing"
        require(policy.group_budgets(2)[0] >= 0, "reuse_layers", size, most)
        return policy

    @property
    def caution(self) -> str:
        first, last = self.group_budgets(2)
        if last > first:
            return "keeps more in upper layers"
        return "may keep no window in upper layers" if last < self.chunk_size else ""

    @property
    def event_trigger(self) -> Trigger:
        """Once the prompt is in, if any layer has something to drop."""
        return AtPrefillEnd(Budget(min(self.group_budgets(2)) + self.protected), self.protected)

    def group_budgets(self, num_groups: int) -> list[int]:
        """Entries before the window that the layers of each group may keep."""
        assert self.reuse_layers is not None, "for_model fills it in"
        assert self.budget is not None
        mean, shape = self.budget - self.protected, Fraction(str(self.pyramid))
        return group_budgets(mean, num_groups, self.reuse_layers, shape, self.rule)

    def score(self, obs: Observation) -> Tensor:
        """Each entry gets its window's score: float32 [E, L', Hkv, n - window].

        That is the mean of the window's ``best`` entries in each query head, then over the heads.
        """
        votes = obs.all_heads(obs.causal("none"))
        kv_heads = votes.shape[2] * obs.keys.shape[2] // obs.queries.shape[2]
        scored, size = votes.shape[-1], self.chunk_size
        votes = torch.nn.functional.pad(votes, (0, -scored % size))
        votes = votes.view(*votes.shape[:-1], -1, size)
        best = self.best or (max(size // 2, 1) if self.task == "aggregation" else size)
        there = torch.full(votes.shape[-2:-1], size, device=votes.device)
        there[-1:] = (scored - 1) % size + 1
        worth = votes.topk(best, dim=-1).values.sum(dim=-1) / there.clamp(max=best)
        worth = worth.mean(dim=-2).repeat_interleave(size, dim=-1)[..., :scored]
        return worth[:, :, None].expand(-1, -1, kv_heads, -1)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best windows of each group and the newest entries: counts equal over heads."""
        scored, size = scores.shape[-1], self.chunk_size
        windows = -(-scored // size)
        budgets = self.group_budgets(scores.shape[1])
        kept = [max(0, windows + (b - scored) // size) for b in budgets]
        chunks = layers(kept, scores).expand(scores.shape[:-1])
        return Selection(*uneven_chunks_and_newest(scores, length, size, chunks))


def _nearest_divisor(num_layers: int) -> int:
    """The divisor of ``num_layers`` nearest to a quarter of it; of two, the smaller."""
    divisors = [size for size in range(1, num_layers + 1) if num_layers % size == 0]
    return min(divisors, key=lambda size: abs(4 * size - num_layers))
