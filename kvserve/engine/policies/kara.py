"""Kara: sliding-window compression of generated text (arXiv 2607.01237).

Every full window of generated tokens is scored by the window's own queries, without a causal mask
(Eq. 4); single tokens and the text between them are kept (Eqs. 5-8); the rest is evicted and the
window slides on. As kvserve runs it: windows start at the oldest uncompressed token, all pending
ones are taken in one event, and queries come from the log written during decoding, or from one more
pass over the window's tokens, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import ceil
from typing import ClassVar

from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, exact_ratio, integers, require
from kvserve.engine.policies.scoring import AGGREGATES, Observation
from kvserve.engine.policies.selection import token_to_chunk
from kvserve.scheduler.periodic import EngineWide, Periodic
from kvserve.scheduler.trigger import Trigger

_LEAST_QUERIES = 8
_MOST_IN_THE_PAPER = 30
_PAPER: dict[str, object] = {
    "window": 768,
    "buffer": 32,
    "budget": 257,
    "period": 128,
    "query_source": "recompute",
    "query_reduce": "heads",
    "query_aggregate": "sum",
}


@dataclass(frozen=True)
class Kara(Policy):
    """Keep a fixed share of every window of generated tokens; the prompt is left alone.

    Use it for long generations on a pool that is too small for them. With room for everything it
    costs a little and gains nothing; outputs shorter than ``window`` are never touched.
    """

    name: ClassVar[str] = "kara"
    cost: ClassVar[str] = (
        "A query per token that is not compressed yet: half of that token's keys and values "
        "(query_reduce heads: as many halves as there are query heads per KV head). An event "
        "scores window x (window - buffer) pairs per head; with query_source recompute there is no "
        "log, and one more forward over the window's tokens instead."
    )
    avoid: ClassVar[str] = (
        "Outputs shorter than window; pools with room for everything; text that must quote its own "
        "earlier output exactly."
    )

    window: int = argument(512, "W: generated tokens per window", least=1, note="above buffer")
    buffer: int = argument(
        32,
        "U: newest tokens of a window, always kept; they open the next one",
        least=0,
        note="below window",
    )
    ratio: float | str | None = argument(
        None,
        "r: fraction of the window - buffer older tokens that is kept (default 0.3)",
        note="above 0, at most 1",
    )
    budget: int | None = argument(
        None,
        "entries kept per window, buffer included; give this or ratio",
        least=1,
        note="above buffer, at most window",
    )
    period: int = argument(
        32, "decode steps of the sequence between looks for full windows", least=1
    )
    chunk_budget: int | None = argument(
        None,
        "alpha: kept entries spent on whole chunks between chosen tokens; 0 turns them off "
        "(default: 16, or half of what is kept where that is less)",
        least=0,
        note="below what is kept of window - buffer",
    )
    max_chunk: int = argument(8, "gamma: longest chunk, both ends included", least=3)
    query_source: str = argument(
        "log",
        "log: queries are kept while decoding; recompute: computed again at the event",
        choices=("log", "recompute"),
        note="log_host, a log in host memory, is not built",
    )
    query_reduce: str = argument(
        "group_mean",
        "which queries score: the mean over each GQA group, or all heads",
        choices=("group_mean", "heads"),
    )
    query_dtype: str = argument(
        "auto",
        "how queries are logged: in the model's dtype, or as fp8 (e4m3, one byte a number); auto "
        "is fp8 on a GPU that has it, unless the model runs in float32",
        choices=("auto", "model", "fp8"),
    )
    query_aggregate: str = argument(
        "max",
        "over the window's queries; sum is Eq. 4, but max keeps what one query really needs, which "
        "on the shipped model keeps far more accuracy",
        choices=AGGREGATES,
    )
    query_stride: int = argument(
        1,
        "score with every s-th query of the window and always the last one",
        least=1,
        note="8 queries have to remain",
    )
    queries: str = argument(
        "window",
        "whose queries score: the window's, or the buffer's alone (Table 1's ablation)",
        choices=("window", "buffer"),
    )
    protect_prompt: bool = argument(
        True, "leave the prompt alone; otherwise its windows are compressed too, at its end"
    )
    preset: str | None = argument(
        None,
        "paper: its serving run, for comparison. Other defaults (window 768, budget 257, period "
        "128, queries recomputed, all heads, sum), and its schedule: every period steps of the "
        "engine, at most 30 sequences, oldest first, windows of trailing full blocks",
        choices=("paper",),
    )

    presets: ClassVar[dict[str, dict[str, object]]] = {"paper": _PAPER}

    def __post_init__(self) -> None:
        integers(self, window=1, buffer=0, period=1, max_chunk=3, query_stride=1)
        require(self.buffer < self.window, "buffer", self.buffer, f"below window ({self.window})")
        protects = isinstance(self.protect_prompt, bool)
        require(protects, "protect_prompt", self.protect_prompt, "true or false")
        self._check_queries()
        self._check_counts()
        if self.preset is not None:
            recomputes = self.query_source == "recompute"
            require(recomputes, "query_source", self.query_source, "recompute with preset paper")
            require(self.protect_prompt, "protect_prompt", False, "true with preset paper")

    def _check_queries(self) -> None:
        for f in fields(self):
            choices, note = f.metadata["choices"], f.metadata["note"]
            if choices and not (f.default is None and getattr(self, f.name) is None):
                allowed = " or ".join(choices) + (f" ({note})" if note else "")
                require(getattr(self, f.name) in choices, f.name, getattr(self, f.name), allowed)
        count = self.window if self.queries == "window" else self.buffer
        require(count > 0, "queries", self.queries, "window where buffer is 0")
        remain, rest = divmod(count, self.query_stride)
        require(
            self.query_stride == 1 or (rest == 0 and remain >= _LEAST_QUERIES),
            "query_stride",
            self.query_stride,
            f"a divisor of the {count} queries that leaves at least {_LEAST_QUERIES} of them",
        )

    def _check_counts(self) -> None:
        if self.budget is not None:
            require(self.ratio is None, "budget", self.budget, "left out where ratio is given")
            integers(self, budget=1)
            allowed = f"above buffer ({self.buffer}) and at most window ({self.window})"
            require(self.buffer < self.budget <= self.window, "budget", self.budget, allowed)
        keep = self.keep
        if self.chunk_budget is not None:
            integers(self, chunk_budget=0)
            allowed = f"below the {keep} entries kept of a window's older tokens"
            require(self.chunk_budget < keep, "chunk_budget", self.chunk_budget, allowed)

    @property
    def keep(self) -> int:
        """N: entries kept of the window - buffer compressible ones (Eq. 5)."""
        if self.budget is not None:
            return self.budget - self.buffer
        ratio = exact_ratio(0.3 if self.ratio is None else self.ratio, "ratio")
        return ceil(ratio * (self.window - self.buffer))

    @property
    def alpha(self) -> int:
        """Entries spent on chunks (Eq. 8)."""
        return min(16, self.keep // 2) if self.chunk_budget is None else self.chunk_budget

    @property
    def query_reduction(self) -> str | None:
        return self.query_reduce if self.query_source == "log" else None

    @property
    def logged_dtype(self) -> str:
        return self.query_dtype

    @property
    def recomputed_reduction(self) -> str | None:
        return self.query_reduce if self.query_source == "recompute" else None

    def query_places(self, num_queries: int) -> range:
        """Every ``query_stride``-th place, counted back from the window's last one."""
        first = 0 if self.queries == "window" else self.window - self.buffer
        return range(self.window - 1, first - 1, -self.query_stride)[::-1]

    @property
    def trigger(self) -> Trigger:
        if self.preset == "paper":
            most = _MOST_IN_THE_PAPER
            return EngineWide(self.window, self.buffer, self.keep, self.period, most)
        logs = self.query_source == "log"
        return Periodic(self.window, self.buffer, self.keep, self.period, self.protect_prompt, logs)

    def score(self, obs: Observation) -> Tensor:
        """Eq. 4, one score per KV head: float32 [E, L, Hkv, n]."""
        return obs.mass(self.query_aggregate)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """Token2Chunk with the fill rule: [E, L, Hkv, keep]."""
        return token_to_chunk(scores, keep, self.alpha, self.max_chunk)
