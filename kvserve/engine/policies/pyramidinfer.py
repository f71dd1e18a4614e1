"""PyramidInfer: compute fewer of a prompt's tokens from layer to layer (arXiv 2405.12532).

Tokens that a prompt's newest tokens hardly attend to in one layer are left out of all layers above:
their keys, their values and their computation (section 3). Ratios and rounding follow the authors'
code. As kvserve runs it, tokens generated later are scored over the entries still held then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, Selection, argument
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.budgets import layers
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import best_and_newest, uneven_best_and_newest
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.pruning import Pruned, Taper

_PRUNES = ("decay below 1",)


@dataclass(frozen=True)
class PyramidInfer(Policy):
    """Drop prompt tokens layer by layer: a layer passes on the tokens that the prompt's newest
    tokens attend to most. Of generated tokens keep a share that shrinks from layer to layer.

    How much is kept follows from the length of the prompt. A prompt is computed in one step: one
    longer than --max-num-batched-tokens is refused. It takes no prefix cache hits and gives none.
    All heads of a layer keep the same tokens. Prompts with no more than ``min_context`` tokens
    before the recent ones are not pruned, and are computed as under any policy.
    """

    name: ClassVar[str] = "pyramidinfer"
    granularity: ClassVar[Granularity] = Granularity.LAYER
    cuts_again: ClassVar[bool] = True
    couples_heads: ClassVar[bool] = True
    cost: ClassVar[str] = (
        "For a moment the blocks of the whole prompt, though upper layers compute and hold less; a "
        "log of as many queries as there are recent tokens, and every period tokens an event that "
        "scores these queries x entries pairs per head; a block table per layer."
    )
    avoid: ClassVar[str] = (
        "Prompts that share a beginning, or that are longer than a step; prompts in front of "
        "others' decodes, which wait for the whole of it; several questions about one prompt."
    )

    recent_ratio: float = argument(
        0.2,
        "newest part of the prompt that is always kept, and one token more; its queries score the "
        "others",
        least=0,
        most=0.99,
    )
    min_context: int = argument(64, "tokens before the recent ones that are always kept", least=0)
    sinks: int = argument(4, "first tokens, always kept", least=0, only_if=_PRUNES)
    decay: float = argument(
        0.9, "share of its tokens that a layer would hand on behind the last one", least=0, most=1
    )
    schedule: str = argument(
        "cosine",
        "how shares fall from 1 in the first layer: along half a cosine, or linearly",
        choices=("cosine", "linear"),
    )
    interval: int = argument(
        1, "layers from one pruning to the next", least=1, most=common.MOST_LAYERS, only_if=_PRUNES
    )
    distance_weight: float = argument(
        1.2,
        "what the newest query counts, where the oldest that scores counts 1",
        least=0,
        most=1e6,
        only_if=("recent_ratio above 0",),
    )
    period: int = argument(16, "generated tokens of which a part is kept, together", least=1)
    decode_ratio: float = argument(0.9, "part of them that the first layer keeps", least=0, most=1)
    decode_decay: float = argument(
        0.1,
        "as decay, for these",
        least=0,
        most=1,
        only_if=("period above 1", "decode_ratio above 0"),
    )
    query_reduce: str = common.query_reduce("which queries are logged for them")

    @property
    def caution(self) -> str:
        return "refuses prompts longer than --max-num-batched-tokens"

    @property
    def event_trigger(self) -> Pruned:
        return Pruned(
            self.recent_ratio,
            self.min_context,
            Taper(self.decay, self.schedule),
            self.interval,
            self.period,
            Taper(self.decode_decay, self.schedule),
            self.decode_ratio,
        )

    def score(self, obs: Observation) -> Tensor:
        """Weighted mean of the recent queries' attention: float32 [E, L, H, n - recent]."""
        count, device = obs.queries.shape[-2], obs.keys.device
        return obs.weighted_mass(torch.linspace(1, self.distance_weight, count, device=device))

    def survivors(self, obs: Observation, keep: int) -> Tensor:
        """The first tokens, the recent ones, and the best of the others."""
        scores = self.score(obs)[0, 0, 0].clone()
        scores[: self.sinks] = torch.inf
        return best_and_newest(scores, obs.keys.shape[-2], keep)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """All entries kept before, the best of the ``period`` after them, and the recent ones."""
        older = scores.shape[-1] - self.period
        known = scores[..., :older]
        scores = torch.cat(
            [torch.where(known > -torch.inf, torch.inf, known), scores[..., older:]], -1
        )
        kept = layers(self.event_trigger.kept_of_period(scores.shape[1]), scores) - self.period
        there = (scores > -torch.inf).sum(dim=-1) + length - scores.shape[-1]
        return Selection(uneven_best_and_newest(scores, length, there + kept), there + kept)
