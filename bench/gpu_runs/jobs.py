"""The rows of bench/gpu.py: models, policies and traffic, the most important first."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BLOCK = 64
POOL = 335_000
"""Tokens of the limited pool: a third of what 256 sequences would hold at 4,000 tokens each."""
SMALLER_POOL = 200_000
"""The same for a model whose weights leave less of 80 GB."""
NONE, KARA = "none", "kara"
THRESHOLD = "snapkv:trigger=threshold,budget=1025,threshold=1280,protect_prompt=false"
PAPER, AGAIN = "kara:preset=paper", "kara:query_source=recompute"
SMALL_WINDOW = "kara:window=384,ratio=0.2"
PYRAMID = "pyramidkv:trigger=threshold,budget=1025,threshold=1280"
ADA = "adakv:trigger=threshold,budget=1025,threshold=1280,protect_prompt=false"
_SMOKE = {
    NONE: NONE,
    KARA: "kara:window=24,buffer=4,period=4",
    THRESHOLD: "snapkv:trigger=threshold,budget=24,threshold=32,window=4,protect_prompt=false",
    PAPER: "kara:preset=paper,window=32,buffer=4,budget=16,period=8",
    AGAIN: "kara:query_source=recompute,window=24,buffer=4,period=4",
    SMALL_WINDOW: "kara:window=24,buffer=4,ratio=0.3,period=4",
    PYRAMID: "pyramidkv:trigger=threshold,budget=24,threshold=32,window=4",
    ADA: "adakv:trigger=threshold,budget=24,threshold=32,window=4,protect_prompt=false",
}


@dataclass(frozen=True)
class Job:
    """A row: ``requests`` prompts of ``prompt`` tokens, answers log-normal around ``mean`` (all
    equal without ``sigma``) and cut at ``cap``; the pool has the bytes of ``pool`` tokens as they
    are computed, or of all if ``None``. ``form``: --kv-cache-dtype.
    """

    policy: str
    seqs: int = 256
    model: str = "llama-3.1-8b"
    pool: int | None = POOL
    requests: int = 1000
    prompt: int = 250
    mean: int = 3000
    sigma: float = 0.7
    cap: int = 8192
    eager: bool = False
    overlaps: bool = True
    form: str = "auto"

    @property
    def label(self) -> str:
        """The policy, and the form of its cache."""
        return self.policy if self.form == "auto" else f"{self.policy}@{self.form}"

    @property
    def traffic(self) -> str:
        """What rows must have in common to be compared."""
        pool = "ample" if self.pool is None else f"{self.pool} tokens"
        answers = f"answers of {self.mean}" + (f" up to {self.cap}" if self.sigma else "")
        without = ", eager" * self.eager + ", steps do not overlap" * (not self.overlaps)
        return f"{self.model}, {self.seqs} at once, pool {pool}, {answers}{without}"

    @property
    def name(self) -> str:
        return f"{self.label} | {self.traffic}"

    def small(self) -> Job:
        """The same job on a model that a CPU runs in a second."""
        return replace(
            self,
            policy=_SMOKE[self.policy],
            model="smoke",
            seqs=max(1, self.seqs // 32),
            pool=None if self.pool is None else 12 * BLOCK,
            requests=max(1, self.seqs // 20),
            prompt=20,
            mean=max(40, self.mean // 60),
            cap=max(40, self.cap // 60),
        )


def steps(seqs: int) -> Job:
    """Decoding only, at a context of about 2,000 tokens: a step beside the memory bandwidth."""
    return Job(NONE, seqs, pool=None, requests=seqs, prompt=1900, mean=200, sigma=0, cap=200)


def long_traces(policy: str) -> Job:
    """Answers as long as reasoning models'; fewer requests, or a row would take an hour."""
    return Job(policy, requests=150, mean=12_000, cap=16_384)


JOBS = (
    *(Job(policy) for policy in (NONE, KARA, THRESHOLD)),
    *(Job(policy, form=form) for form in ("k8v4", "k4v4") for policy in (NONE, KARA)),
    *(steps(seqs) for seqs in (1, 64)),
    *(Job(policy) for policy in (SMALL_WINDOW, AGAIN)),
    *(long_traces(policy) for policy in (NONE, KARA)),
    *(Job(policy, pool=None) for policy in (NONE, KARA)),
    *(Job(policy, model="qwen3-4b") for policy in (NONE, KARA)),
    *(Job(policy, eager=True) for policy in (NONE, KARA)),
    *(Job(policy, overlaps=False) for policy in (NONE, KARA)),
    *(Job(policy, 128) for policy in (NONE, KARA, THRESHOLD)),
    *(Job(policy) for policy in (PAPER, PYRAMID, ADA)),
    *(long_traces(policy) for policy in (THRESHOLD, SMALL_WINDOW)),
    *(Job(policy, model="llama-3.1-8b-fp8") for policy in (NONE, KARA)),
    *(Job(policy, model="qwen3-14b", pool=SMALLER_POOL) for policy in (NONE, KARA)),
)
