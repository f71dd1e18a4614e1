"""Kara: sliding-window compression of generated text, with our own defaults (arXiv 2607.01237).

Every full window of generated tokens is scored by the window's own queries, without a causal mask
(Eq. 4); single tokens and the text between them are kept (Eqs. 5-8); the rest is evicted and the
window slides on. As kvserve runs it: windows start at the oldest uncompressed token, all pending
ones are taken in one event, and queries come from the log written during decoding, or from one more
pass over the window's tokens, as in the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, argument, exact_ratio, require
from kvserve.engine.policies.parts import common
from kvserve.engine.policies.parts.arguments import MOST_TOKENS
from kvserve.engine.policies.scoring import AGGREGATES, GROUP_AGGREGATES, Observation, Remainder
from kvserve.engine.policies.selection import token_to_chunk
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic
from kvserve.scheduler.triggers.trigger import Trigger

_LEAST_QUERIES = 8
_USUAL_RATIO = 0.3
_PERIOD = 32
_MOST_IN_THE_PAPER = 30
_PAPER: dict[str, object] = {
    "window": 768,
    "buffer": 32,
    "budget": 257,
    "period": 128,
    "chunk_budget": None,
    "query_source": "recompute",
    "query_reduce": "heads",
    "query_aggregate": "sum",
    "group_aggregate": "mean",
    "remainder": "off",
}


@dataclass(frozen=True)
class Kara(Policy):
    """Keep a fixed share of every window of generated tokens; nine defaults are not the paper's.

    ``preset=paper`` has the paper's. The prompt is left alone. Use it for long generations on a
    pool that is too small for them. With room for everything it costs a little and gains nothing;
    outputs shorter than ``window`` are never touched.
    """

    name: ClassVar[str] = "kara"
    cost: ClassVar[str] = (
        "The queries of every token that is not compressed yet, in 4 bits: half of that token's "
        "keys and values at four query heads per KV head in bfloat16. An event scores window x "
        "(window - buffer) pairs per query head; with query_source recompute there is no log, and "
        "one more forward over the window's tokens instead. With score_every it logs so many "
        "tokens, and four bytes for each of a window's entries and KV heads."
    )
    avoid: ClassVar[str] = (
        "Outputs shorter than window; pools with room for everything; text that must quote its own "
        "earlier output exactly."
    )

    window: int = argument(512, "W: generated tokens per window", least=1, note="above buffer")
    buffer: int = argument(
        None,
        "U: newest tokens of a window, always kept; they open the next one (default: a quarter of "
        "the window)",
        least=0,
        most=MOST_TOKENS,
        below="window",
    )
    ratio: float | str | None = common.kept_ratio(
        None, "r: fraction of the window - buffer older tokens that is kept (default: 0.3)"
    )
    budget: int | None = argument(
        None,
        "entries kept per window, buffer included; give this or ratio",
        least=1,
        above="buffer",
        at_most="window",
    )
    period: int = argument(
        _PERIOD, "decode steps of the sequence between looks for full windows", least=1
    )
    chunk_budget: int | None = argument(
        0,
        "alpha: kept entries spent on whole chunks between chosen tokens (Token2Chunk); 0 turns "
        "them off (with preset paper 16, or half of what is kept where that is less)",
        least=0,
        note="at least max_chunk - 2, below what is kept of window - buffer",
    )
    max_chunk: int = argument(
        8, "gamma: longest chunk, both ends included", least=3, only_if=("chunk_budget above 0",)
    )
    query_source: str = argument(
        "log",
        "log: queries are kept while decoding; recompute: computed again at the event",
        choices=("log", "recompute"),
        note="log_host, a log in host memory, is not built",
    )
    query_reduce: str = common.query_reduce("which queries score")
    query_dtype: str = common.query_dtype(
        "int4 where all heads are logged, and of group means ", ("query_source log",)
    )
    attention: str | None = common.attention(
        None,
        "the window's older tokens, as in Eq. 4",
        ", and over what came after it in the window (default: absolute where query_dtype is int4)",
    )
    query_aggregate: str = argument(
        "sum_squares",
        "over the window's queries; sum is Eq. 4, but squares count what a query really needs for "
        "more than what many like a little, which keeps far more accuracy",
        choices=AGGREGATES,
    )
    group_aggregate: str = argument(
        "rms",
        "over the query heads of a KV head, where all heads score; the root mean square lets what "
        "one head looks for count for more than a mean does, and does not forget the others",
        choices=GROUP_AGGREGATES,
        only_if=("query_reduce heads",),
    )
    remainder: str | None = common.remainder(None, " (default: mean, or off with rest_bits)")
    rest_bits: float = common.rest_bits()
    query_stride: int = argument(
        1,
        "log, or compute again, every s-th query of the window and always the last one: a log of "
        "as many bytes less, and scores that miss what the others looked for",
        least=1,
        note="8 queries have to remain",
    )
    score_every: int | None = argument(
        None,
        "tokens after which their queries score all entries of the window so far, and are given "
        "back; what is kept instead are the sums of scores, four bytes an entry (default: all of a "
        "window's queries score at once, and the log keeps them until then)",
        least=8,
        note="a divisor of window and buffer; with query_source log",
    )
    queries: str = argument(
        "window",
        "whose queries score: the window's, or the buffer's alone (Table 1's ablation)",
        choices=("window", "buffer"),
    )
    protect_prompt: bool = argument(
        True, "leave the prompt alone; otherwise its windows are compressed too, at its end"
    )
    protect_turns: bool = argument(
        False,
        "where a conversation goes on (--continuations): leave later prompts alone too; otherwise "
        "its windows go on over them",
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
        if self.buffer is None and isinstance(self.window, int):
            object.__setattr__(self, "buffer", self.window // 4)
        if self.remainder is None:
            object.__setattr__(self, "remainder", "off" if self.rest_bits else "mean")
        super().__post_init__()

    def check(self) -> None:
        count = self.window if self.queries == "window" else self.buffer
        require(count > 0, "queries", self.queries, "window where buffer is 0")
        remain, rest = divmod(count, self.query_stride)
        require(
            self.query_stride == 1 or (rest == 0 and remain >= _LEAST_QUERIES),
            "query_stride",
            self.query_stride,
            f"a divisor of the {count} queries that leaves at least {_LEAST_QUERIES} of them",
        )
        if self.query_source == "log":  # it counts from each window's first token
            even = self.window % self.query_stride == self.buffer % self.query_stride == 0
            allowed = f"a divisor of window {self.window} and buffer {self.buffer}"
            require(even, "query_stride", self.query_stride, allowed)
        if self.score_every is not None:
            self._check_sums(self.score_every)
        if self.budget is not None:
            require(self.ratio is None, "budget", self.budget, "left out where ratio is given")
        if self.chunk_budget is not None:
            allowed = f"below the {self.keep} entries kept of a window's older tokens"
            require(self.chunk_budget < self.keep, "chunk_budget", self.chunk_budget, allowed)
            allowed = f"0, or enough for a chunk: at least {self.max_chunk - 2} (max_chunk - 2)"
            enough = self.chunk_budget == 0 or self.chunk_budget >= self.max_chunk - 2
            require(enough, "chunk_budget", self.chunk_budget, allowed)
        if self.preset is not None:
            recomputes = self.query_source == "recompute"
            require(recomputes, "query_source", self.query_source, "recompute with preset paper")
            require(self.protect_prompt, "protect_prompt", False, "true with preset paper")
            goes_on = not self.protect_turns
            require(goes_on, "protect_turns", True, "false with preset paper")

    def _check_sums(self, every: int) -> None:
        """Check that scores can be added up every so many tokens."""
        divides = self.window % every == 0 and self.buffer % every == 0
        allowed = f"a divisor of window {self.window} and buffer {self.buffer}"
        require(divides, "score_every", every, allowed)
        sums = self.query_source == "log" and self.queries == "window" and self.query_stride == 1
        allowed = "left out unless query_source is log, queries window and query_stride 1"
        require(sums, "score_every", every, allowed)
        require(self.query_aggregate != "max", "query_aggregate", "max", "one that adds up")
        goes_on = self.protect_prompt and not self.protect_turns
        require(goes_on, "score_every", every, "left out unless the prompt alone is protected")
        require(not self.rest_bits, "rest_bits", self.rest_bits, "left out with score_every")
        allowed = "left out with score_every, whose events come when a window is full"
        require(self.period == _PERIOD, "period", self.period, allowed)

    @property
    def keep(self) -> int:
        """N: entries kept of the window - buffer compressible ones (Eq. 5)."""
        if self.budget is not None:
            return self.budget - self.buffer
        ratio = _USUAL_RATIO if self.ratio is None else self.ratio
        return ceil(exact_ratio(ratio, "ratio") * (self.window - self.buffer))

    @property
    def alpha(self) -> int:
        """Entries spent on chunks (Eq. 8)."""
        return min(16, self.keep // 2) if self.chunk_budget is None else self.chunk_budget

    @property
    def query_reduction(self) -> str | None:
        return self.query_reduce if self.query_source == "log" else None

    @property
    def recomputed_reduction(self) -> str | None:
        return self.query_reduce if self.query_source == "recompute" else None

    @property
    def logged_dtype(self) -> str:
        logs_heads = self.query_source == "log" and self.query_reduce == "heads"
        return "int4" if self.query_dtype == "auto" and logs_heads else self.query_dtype

    @property
    def sees_all(self) -> bool:
        chosen = "absolute" if self.logged_dtype == "int4" else "window"
        return (self.attention or chosen) == "absolute"

    @property
    def scores_levels(self) -> bool:
        return self.sees_all and self.remainder != "fitted" and not self.score_every

    @property
    def kept_scores(self) -> int:
        return self.window if self.score_every else 0

    def carried(self, keep: int, length: int) -> int:
        return keep if keep == length else self.buffer

    @property
    def later_entries(self) -> int:
        return self.buffer if self.sees_all and not self.score_every else 0

    def query_places(self, num_queries: int) -> range:
        """Every ``query_stride``-th place, counted back from the window's last one."""
        if self.score_every:
            return range(num_queries)
        first = 0 if self.queries == "window" else self.window - self.buffer
        return range(self.window - 1, first - 1, -self.query_stride)[::-1]

    @property
    def event_trigger(self) -> Trigger:
        if self.preset == "paper":
            most = _MOST_IN_THE_PAPER
            return EngineWide(self.window, self.buffer, self.keep, self.period, most)
        if self.score_every:
            from kvserve.scheduler.triggers.summing import Summing

            return Summing(self.window, self.buffer, self.keep, self.score_every)
        logs = self.query_source == "log"
        fixed = self.window, self.buffer, self.keep, self.period
        stride = self.query_stride if logs else 1
        return Periodic(*fixed, self.protect_prompt, logs, self.protect_turns, stride)

    def score(self, obs: Observation) -> Tensor:
        """Eq. 4, one score per KV head: float32 [E, L, Hkv, n]."""
        if not self.score_every:
            return obs.mass(self.query_aggregate, self.group_aggregate, self._places)
        length, every = obs.keys.shape[-2], self.score_every
        places = range(length - every, length) if self.sees_all else None
        scores = obs.mass(self.query_aggregate, self.group_aggregate, places, every)
        if obs.earlier is not None:
            scores[..., : length - every] += obs.earlier[..., : length - every]
        return scores

    def remainder_of(self, obs: Observation, dropped: Tensor) -> Remainder:
        return obs.fitted_remainder(dropped, self._places)

    @cached_property
    def _places(self) -> range | None:
        """The queries' places in the window if attention is absolute, else ``None``."""
        return self.query_places(self.window) if self.sees_all else None

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """Token2Chunk with the fill rule: [E, L, Hkv, keep]."""
        if not self.score_every:
            return token_to_chunk(scores, keep, self.alpha, self.max_chunk)
        newest = torch.arange(length - self.carried(keep, length), length, device=scores.device)
        newest = newest.expand(*scores.shape[:-1], -1)
        if keep == length:
            return newest
        older = scores[..., : length - self.buffer]
        chosen = token_to_chunk(older, keep - self.buffer, self.alpha, self.max_chunk)
        return torch.cat([chosen, newest], dim=-1)
