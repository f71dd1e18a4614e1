"""R-KV: keep what is attended to and not said twice (arXiv 2505.24133).

For long chains of thought. Whenever ``threshold`` entries are held, importance (attention of the
last queries) is weighed against redundancy (similarity to other keys), and the best ``budget``
entries stay (section 3). Details follow the authors' code where the paper is silent; keys are
compared as cached, after RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.scoring import Observation, pool_scores
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import Bounded, WhenOver

_IMPORTANT = ("mix_lambda above 0",)


@dataclass(frozen=True)
class RKV(Policy):
    """Bound what a long generation holds, dropping repetitions first; a prompt above the budget
    is cut when it is in.

    Use it for reasoning models that repeat themselves. An event compares all keys with each other,
    so its cost grows with the square of the threshold.
    """

    name: ClassVar[str] = "rkv"
    cost: ClassVar[str] = (
        "A log of window queries; an event compares threshold x threshold keys per head."
    )
    avoid: ClassVar[str] = (
        "Long prompts, whose keys are all compared with each other and cut unless protect_prompt; "
        "outputs shorter than budget; text without repetitions."
    )
    needs: ClassVar[tuple[str, ...]] = ("budget",)
    ranks_entries: ClassVar[bool] = True
    protects: ClassVar[str] = "window"

    budget: int | None = common.required_budget(
        "entries kept per head, the window among them", least=2, above="window"
    )
    threshold: int | None = common.threshold("entries held when an event is due")
    window: int = common.window(8)
    mix_lambda: float = argument(
        0.07, "lambda: weight of importance; redundancy gets 1 - lambda", least=0, most=1
    )
    similarity: float = argument(
        0.5,
        "cosine above which a key is a near-copy of another",
        least=-1,
        most=1,
        only_if=("mix_lambda below 1",),
    )
    kernel_size: int = common.kernel_size(7, "importance is", ("pooling avg or max", *_IMPORTANT))
    pooling: str = common.pooling(
        "max", "how importance is pooled", only_if=("kernel_size above 1", *_IMPORTANT)
    )
    protect_prompt: bool = argument(False, "the prompt neither counts nor takes part")
    remainder: str = common.remainder()
    rest_bits: float = common.rest_bits()
    query_reduce: str = common.query_reduce()
    query_dtype: str = common.query_dtype()
    attention: str = common.attention("window", "the entries before the window")

    @property
    def event_trigger(self) -> Trigger:
        assert self.budget is not None
        limit = common.limit(self.budget, self.threshold)
        if self.protect_prompt:
            return WhenOver(limit, self.budget, self.window, True, self.window)
        return Bounded(self.budget, limit, self.window, intact=self.window)

    def score(self, obs: Observation) -> Tensor:
        """Z = lambda I - (1 - lambda) R of the entries before the window: [E, L, Hkv, n - window].

        Logits are reduced by their maximum over each GQA group, as in the authors' code.
        """
        votes = obs.past("max", absolute=self.attention == "absolute")
        importance = pool_scores(votes, self.kernel_size, self.pooling)
        repeated = obs.redundancy(self.similarity)[..., : importance.shape[-1]]
        return obs.there(self.mix_lambda * importance - (1 - self.mix_lambda) * repeated)
