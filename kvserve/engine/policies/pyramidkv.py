"""PyramidKV: more entries for lower layers (arXiv 2406.02069).

Lower layers spread their attention, upper ones gather it on few entries, so budgets fall linearly
with depth; inside a layer the choice is SnapKV's (section 4.2). Budgets follow the authors' code,
which is clamped for prompts near the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Selection, argument
from kvserve.engine.policies.budgeted import THRESHOLD
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.budgets import layers, pyramid_budgets
from kvserve.engine.policies.selection import uneven_best_and_newest
from kvserve.engine.policies.snapkv import SnapKV
from kvserve.scheduler.layout import Granularity

_MOST_BETA = 2**16


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keep the prompt's entries that its last tokens attend to, more of them in lower layers;
    with trigger threshold, bound what a long generation holds.

    ``budget`` is the mean over layers. As released, prompts shorter than twice the budget (less
    the window) are cut alike in all layers, and rounding may hold some entries more. With trigger
    threshold neither happens: layers grow apart from event to event until the pyramid is reached,
    and the mean never exceeds the budget.
    """

    name: ClassVar[str] = "pyramidkv"
    granularity: ClassVar[Granularity] = Granularity.LAYER
    cuts_again: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "As snapkv, and a block table per layer, whose last blocks are each half empty on average."
    )
    avoid: ClassVar[str] = (
        "Several questions about one prompt, where only the first one votes; prompts not much "
        "longer than budget; models whose upper layers need as much as the lower ones."
    )

    threshold: int | None = common.threshold(
        "mean entries held when an event is due", only_if=THRESHOLD
    )
    window: int = common.window(8)
    kernel_size: int = common.kernel_size(7)
    pooling: str = common.pooling("max")
    beta: int = argument(
        20,
        "the last layer keeps 1/beta of the mean (the window aside) or more",
        least=1,
        most=_MOST_BETA,
    )
    exact_total: bool = argument(
        False,
        "round so that the layers add up to their mean times their number",
        only_if=("trigger prefill", "beta above 1"),
    )

    def layer_budgets(self, num_layers: int, length: int, keep: int, trigger: str) -> list[int]:
        """Entries that each layer keeps of ``length`` (the longest layer's), the window aside."""
        base, most = keep - self.window, length - self.window
        if trigger == "prefill" and length < 2 * base:
            return [base] * num_layers
        exact = self.exact_total or trigger == "threshold"
        return pyramid_budgets(base, most, num_layers, self.beta, exact)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """The best of each layer and the window: counts equal over heads."""
        budgets = layers(self.layer_budgets(scores.shape[1], length, keep, self.trigger), scores)
        there = (scores > -float("inf")).sum(dim=-1)
        counts = there.minimum(budgets) + self.window
        return Selection(uneven_best_and_newest(scores, length, counts), counts)
