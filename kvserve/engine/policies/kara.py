"""Kara: sliding-window compression of generated text (arXiv 2607.01237).

Every full window of generated tokens is scored by the window's own queries, without a causal mask
(Eq. 4); single tokens and the text between them are kept (Eqs. 5-8); the rest is evicted and the
window slides on. As kvserve runs it: windows start at the oldest uncompressed token, all pending
ones are taken in one event, and queries come from the log written during decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, exact_ratio, integers, require
from kvserve.engine.policies.scoring import AGGREGATES, Observation
from kvserve.engine.policies.selection import token_to_chunk
from kvserve.scheduler.trigger import Periodic, Trigger


@dataclass(frozen=True)
class Kara(Policy):
    """Keep a fixed share of every window of generated tokens; the prompt is left alone.

    Use it for long generations on a pool that is too small for them. With room for everything it
    costs a little and gains nothing; outputs shorter than ``window`` are never touched.
    """

    name: ClassVar[str] = "kara"

    window: int = argument(512, "W: generated tokens per window, above buffer")
    buffer: int = argument(32, "U: newest tokens of a window, always kept; they open the next one")
    ratio: float | str | None = argument(
        None, "r: fraction of the window - buffer older tokens that is kept (default 0.3)"
    )
    budget: int | None = argument(
        None, "entries kept per window, buffer included; give this or ratio"
    )
    period: int = argument(32, "decode steps of the sequence between looks for full windows")
    chunk_budget: int = argument(
        16, "alpha: kept entries spent on whole chunks between chosen tokens; 0 turns them off"
    )
    max_chunk: int = argument(8, "gamma: longest chunk, both ends included, at least 3")
    query_reduce: str = argument(
        "group_mean", "which queries are logged: group_mean (mean over each GQA group) or heads"
    )
    query_aggregate: str = argument(
        "sum", "over the window's queries: sum (Eq. 4), sum_squares or max"
    )

    def __post_init__(self) -> None:
        integers(self, window=1, buffer=0, period=1, chunk_budget=0, max_chunk=3)
        require(self.buffer < self.window, "buffer", self.buffer, f"below window ({self.window})")
        require(
            self.query_reduce in ("group_mean", "heads"),
            "query_reduce",
            self.query_reduce,
            "group_mean or heads",
        )
        require(
            self.query_aggregate in AGGREGATES,
            "query_aggregate",
            self.query_aggregate,
            " or ".join(AGGREGATES),
        )
        if self.budget is not None:
            require(self.ratio is None, "budget", self.budget, "left out where ratio is given")
            integers(self, budget=1)
            allowed = f"above buffer ({self.buffer}) and at most window ({self.window})"
            require(self.buffer < self.budget <= self.window, "budget", self.budget, allowed)
        require(
            self.chunk_budget < self.keep,
            "chunk_budget",
            self.chunk_budget,
            f"below the {self.keep} entries kept of a window's older tokens",
        )

    @property
    def keep(self) -> int:
        """N: entries kept of the window - buffer compressible ones (Eq. 5)."""
        if self.budget is not None:
            return self.budget - self.buffer
        ratio = exact_ratio(0.3 if self.ratio is None else self.ratio, "ratio")
        return ceil(ratio * (self.window - self.buffer))

    @property
    def query_reduction(self) -> str | None:
        return self.query_reduce

    @property
    def trigger(self) -> Trigger:
        return Periodic(self.window, self.buffer, self.keep, self.period)

    def score(self, obs: Observation) -> Tensor:
        """Eq. 4, one score per KV head: float32 [E, L, Hkv, n]."""
        return obs.mass(self.query_aggregate)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """Token2Chunk with the fill rule: [E, L, Hkv, keep]."""
        return token_to_chunk(scores, keep, self.chunk_budget, self.max_chunk)
