"""Small settings of every policy, and what they must do to one row: the conformance matrix.

A policy has a row in ``CASES``, or in ``UNEVEN_CASES`` where lengths differ after its events.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvserve.engine.policies.base import Policy, argument
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import best_and_newest
from kvserve.scheduler.triggers.budget import Budget
from kvserve.scheduler.triggers.trigger import Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd

PROMPT, TOKENS = 37, 50
SEEN = PROMPT + TOKENS - 1
"""Tokens in the cache when the last one is sampled; no event at or after that runs."""


@dataclass(frozen=True)
class LongEntries(Policy):
    """A policy from outside: keep the entries whose key and value have the largest norms."""

    name: ClassVar[str] = "long_entries"
    uses_values: ClassVar[bool] = True

    budget: int = argument(15, "entries kept of a prompt")

    @property
    def trigger(self) -> Trigger:
        return AtPrefillEnd(Budget(self.budget), num_queries=0)

    def score(self, obs: Observation) -> Tensor:
        assert obs.values is not None
        return obs.keys.float().norm(dim=-1) * obs.values.float().norm(dim=-1)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        return best_and_newest(scores, length, keep)


@dataclass(frozen=True)
class Case:
    """``events`` are (tokens seen, entries held afterwards).

    ``first`` and ``last`` entries are always held, the newest ``exempt`` ones among them although
    they have scores; ``chunk`` entries are chosen together, and all but ``free`` of the places that
    compete go to the best scores.
    """

    policy: str
    fields: dict[str, Any]
    events: list[tuple[int, int]]
    first: int = 0
    last: int = 0
    exempt: int = 0
    chunk: int = 1
    free: int = 0
    shared_by: int = 1
    """Neighbouring layers that choose alike."""
    roomy: dict[str, Any] = field(default_factory=dict)
    """Changes under which nothing is ever evicted."""

    @property
    def spec(self) -> dict[str, Any]:
        return {"name": self.policy, **self.fields}

    @property
    def label(self) -> str:
        given = (str(v) for k, v in self.fields.items() if k in ("trigger", "mode", "ratio"))
        return "-".join([self.policy, *given, str(len(self.fields))])

    def make(self) -> Policy:
        if self.policy == LongEntries.name:
            return LongEntries(**self.fields)
        return make_policy(self.spec)

    def optimal(self, scores: Tensor, kept: Tensor) -> bool:
        """No place was passed over for a worse one. scores: [..., S'], kept: [..., N]."""
        count = scores.shape[-1] - self.exempt
        scores = scores[..., :count]
        chosen = torch.zeros(*kept.shape[:-1], int(kept.max()) + 1 + count)
        chosen = chosen.scatter(-1, kept, 1.0)[..., :count]
        size = torch.ones(count)
        if self.chunk > 1:
            scores, chosen, size = (self._by_chunk(x) for x in (scores, chosen, size))
        cut = (chosen > 0) & (chosen < size)
        whole = scores.masked_fill(chosen < size, torch.inf).amin(-1, keepdim=True)
        if (cut.sum(-1) > 1).any() or (cut & (scores > whole)).any():
            return False  # one chunk may be cut, the worst
        passed_over = scores.masked_fill(chosen > 0, -torch.inf).amax(-1)
        ranked = scores.masked_fill(chosen == 0, -torch.inf).sort(-1, descending=True).values
        last = (chosen > 0).sum(-1, keepdim=True) - 1 - self.free
        return bool((ranked.gather(-1, last).squeeze(-1) >= passed_over).all())

    def _by_chunk(self, x: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % self.chunk))
        return padded.reshape(*x.shape[:-1], -1, self.chunk).sum(-1)


def every(period: int, first: int, held: int) -> list[tuple[int, int]]:
    """Events from ``first`` tokens seen on, each ``period`` tokens, that leave ``held`` each."""
    return [(seen, held) for seen in range(first, SEEN, period)]


CASES = [
    Case("none", {}, []),
    Case(
        "kara",
        {
            "window": 20, "buffer": 4, "ratio": 0.4, "chunk_budget": 3, "max_chunk": 4, "period": 5,
            "query_reduce": "heads", "query_dtype": "model", "remainder": "off",
        },
        [(57, 48), (77, 59)],
        first=PROMPT,
        last=4,
        free=3,
        roomy={"window": 200},
    ),
    Case(
        "kara",
        {
            "window": 16, "buffer": 0, "budget": 6, "chunk_budget": 0, "period": 1,
            "query_source": "recompute", "remainder": "off",
        },
        [(53, 43), (69, 49), (85, 55)],
        first=PROMPT,
    ),
    Case(
        "streaming_llm",
        {"budget": 16, "sinks": 3},
        every(1, 37, 15),
        first=3,
        last=12,
        roomy={"budget": 86},
    ),
    Case("streaming_llm", {"budget": 45, "sinks": 0, "period": 7}, every(7, 45, 38), 0, 38),
    Case(
        "snapkv", {"budget": 18, "window": 5}, [(37, 18)], last=5, roomy={"budget": 37}
    ),
    Case(
        "snapkv",
        {"ratio": "2/5", "window": 4, "kernel_size": 7, "pooling": "max", "gqa_reduce": "max"},
        [(37, 14)],
        last=4,
        roomy={"ratio": 1},
    ),
    Case(
        "snapkv",
        {"budget": 14, "trigger": "threshold", "threshold": 22, "window": 4, "pooling": "none"},
        every(8, 59, 51),
        first=PROMPT,
        last=4,
        roomy={"threshold": 60},
    ),
    Case(
        "snapkv",
        {
            "budget": 20, "trigger": "threshold", "threshold": 31, "window": 3, "scope": "past",
            "protect_prompt": False, "gqa_reduce": "sum",
        },
        every(11, 37, 20),
        last=3,
        roomy={"budget": 100, "threshold": 101},
    ),
    Case(
        "rkv",
        {"budget": 24, "threshold": 40, "window": 4},
        every(16, 37, 24),
        last=4,
        roomy={"budget": 86, "threshold": 87},
    ),
    Case(
        "rkv",
        {"budget": 16, "threshold": 23, "window": 2, "mix_lambda": 0.5, "protect_prompt": True},
        every(7, 60, 53),
        first=PROMPT,
        last=2,
        roomy={"threshold": 99},
    ),
    Case("keydiff", {"budget": 13}, [(37, 13)], roomy={"budget": 37}),
    Case("keydiff", {"ratio": 0.5, "recent": 6}, [(37, 18)], last=6, roomy={"ratio": "1"}),
    Case(
        "keydiff",
        {
            "budget": 20, "trigger": "threshold", "threshold": 30, "recent": 2,
            "protect_prompt": True,
        },
        every(10, 67, 57),
        first=PROMPT,
        last=2,
        roomy={"threshold": 70},
    ),
    Case(
        "keydiff",
        {"budget": 11, "mode": "block", "block": 8},
        [(16, 11), (24, 11), (32, 11), (37, 11)],
        roomy={"budget": 37},
    ),
    Case(
        "keydiff",
        {
            "budget": 11, "mode": "block", "block": 15, "trigger": "threshold", "threshold": 20,
            "recent": 3,
        },
        [(15, 11), (30, 11), (37, 11), *every(9, 46, 11)],
        last=3,
        roomy={"budget": 90, "threshold": 91},
    ),
    Case(
        "triattention",
        {"budget": 44, "period": 6, "recent": 3},
        every(6, 50, 44),
        first=PROMPT,
        last=3,
        roomy={"budget": 99},
    ),
    Case(
        "triattention",
        {"ratio": 0.4, "period": 5, "recent": 2, "mode": "union", "aggregation": "max"},
        [(seen, PROMPT + max(3, (seen - PROMPT) * 2 // 5)) for seen in range(45, SEEN, 5)],
        first=PROMPT,
        last=2,
        shared_by=8,
    ),
    Case(
        "triattention",
        {
            "budget": 20, "period": 9, "recent": 4, "mode": "per_head", "normalise": False,
            "protect_prompt": False,
        },
        every(9, 37, 20),
        last=4,
        shared_by=8,
    ),
    Case(
        "chunkkv",
        {"budget": 18, "window": 5, "chunk_size": 6},
        [(37, 18)],
        last=5,
        chunk=6,
        roomy={"budget": 37},
    ),
    Case(
        "chunkkv",
        {
            "ratio": 0.45, "window": 3, "chunk_size": 5, "head_mode": "kv_head", "reuse_layers": 2,
            "pooling": "avg",
        },
        [(37, 17)],
        last=3,
        chunk=5,
        shared_by=2,
        roomy={"ratio": 1},
    ),
    Case(
        "chunkkv",
        {"budget": 22, "trigger": "threshold", "threshold": 30, "window": 4, "chunk_size": 4,
         "protect_prompt": False},
        every(8, 37, 22),
        last=4,
        chunk=4,
        roomy={"budget": 90, "threshold": 99},
    ),
    Case(
        "h2o",
        {"budget": 15, "recent": 4},
        every(1, 37, 15),
        last=4,
        exempt=4,
        roomy={"budget": 86},
    ),
    Case("h2o", {"budget": 50}, every(1, 51, 50), last=25, exempt=25, roomy={"budget": 90}),
    Case(
        "h2o",
        {"budget": 15, "recent": 0, "decode_update": False},
        [(37, 15)],
        roomy={"budget": 37},
    ),
    Case("long_entries", {"budget": 12}, [(37, 12)], roomy={"budget": 37}),
]  # fmt: skip

UNEVEN_BLOCK = 4
UNEVEN_CASES: dict[str, dict[str, Any]] = {
    "pyramidkv": {"name": "pyramidkv", "budget": 20, "window": 4, "beta": 4},
    "pyramidkv-threshold": {
        "name": "pyramidkv", "budget": 20, "window": 4, "beta": 4, "trigger": "threshold",
        "threshold": 30,
    },
    "adakv": {"name": "adakv", "budget": 20, "window": 4},
    "adakv-threshold": {
        "name": "adakv", "budget": 20, "window": 4, "trigger": "threshold", "threshold": 31,
        "protect_prompt": False,
    },
    "adakv-keydiff": {"name": "adakv", "budget": 20, "scorer": {"name": "keydiff", "recent": 4}},
    "dynamickv": {"name": "dynamickv", "budget": 20, "window": 4, "interval": 1},
    "chunkkv-blocks": {
        "name": "chunkkv", "budget": 25, "chunk_size": UNEVEN_BLOCK, "window": 4, "align": "block",
    },
    "pyramidinfer": {
        "name": "pyramidinfer", "min_context": 8, "decay": 0.2, "period": 8, "decode_decay": 0.3,
    },
    "windowkv": {
        "name": "windowkv", "budget": 24, "task": "localization", "window": 4, "chunk_size": 4,
        "reuse_layers": 1, "pyramid": 3,
    },
    "windowkv-aggregation": {
        "name": "windowkv", "budget": 24, "task": "aggregation", "window": 4, "chunk_size": 4,
        "reuse_layers": 1, "pyramid": 3,
    },
    "spindlekv": {"name": "spindlekv", "ratio": 0.3, "window": 4, "codebook": False},
}  # fmt: skip
"""Settings of the policies that keep unequal counts (``choose``), on prompts of 70 tokens."""
