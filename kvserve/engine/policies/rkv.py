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

from kvserve.engine.policies.base import Policy, argument, integers, number, odd, one_of
from kvserve.engine.policies.budgeted import (
    DEFAULT_GAP,
    check_budget,
    check_threshold,
    threshold_or_default,
)
from kvserve.engine.policies.scoring import POOLINGS, Observation, pool_scores
from kvserve.engine.policies.selection import best_and_newest
from kvserve.scheduler.trigger import Bounded, Trigger, WhenOver


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

    budget: int | None = argument(
        None, "entries kept per head, the window among them; required", least=2, note="above window"
    )
    threshold: int | None = argument(
        None,
        f"entries held when an event is due (default budget + {DEFAULT_GAP})",
        least=1,
        note="above budget",
    )
    window: int = argument(8, "newest entries: always kept, and their queries vote", least=1)
    mix_lambda: float = argument(
        0.07, "lambda: weight of importance; redundancy gets 1 - lambda", least=0, most=1
    )
    similarity: float = argument(
        0.5, "cosine above which a key is a near-copy of another", least=-1, most=1
    )
    kernel_size: int = argument(7, "entries over which importance is pooled", least=1, note="odd")
    pooling: str = argument("max", "how importance is pooled", choices=POOLINGS)
    protect_prompt: bool = argument(False, "the prompt neither counts nor takes part")
    query_reduce: str = argument(
        "heads",
        "which queries are logged: all heads, or the mean over each GQA group",
        choices=("heads", "group_mean"),
    )

    def __post_init__(self) -> None:
        integers(self, window=1)
        number("mix_lambda", self.mix_lambda, 0, 1)
        number("similarity", self.similarity, -1, 1)
        odd("kernel_size", self.kernel_size)
        one_of("pooling", self.pooling, POOLINGS)
        one_of("protect_prompt", self.protect_prompt, (True, False))
        one_of("query_reduce", self.query_reduce, ("heads", "group_mean"))
        check_budget(self.budget, self.window + 1, f"above window ({self.window})")
        check_threshold(self.threshold, self.budget or 0)

    @property
    def protected(self) -> int:
        return self.window

    @property
    def query_reduction(self) -> str | None:
        return self.query_reduce

    @property
    def trigger(self) -> Trigger:
        assert self.budget is not None
        limit = threshold_or_default(self.threshold, self.budget)
        if self.protect_prompt:
            return WhenOver(limit, self.budget, self.window, protect_prompt=True)
        return Bounded(self.budget, limit, self.window)

    def score(self, obs: Observation) -> Tensor:
        """Z = lambda I - (1 - lambda) R of the entries before the window: [E, L, Hkv, n - window].

        Logits are reduced by their maximum over each GQA group, as in the authors' code.
        """
        importance = pool_scores(obs.past("max"), self.kernel_size, self.pooling)
        repeated = obs.redundancy(self.similarity)[..., : importance.shape[-1]]
        return obs.there(self.mix_lambda * importance - (1 - self.mix_lambda) * repeated)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """The best ``keep - window`` and the window: [E, L, Hkv, keep]."""
        return best_and_newest(scores, length, keep)
