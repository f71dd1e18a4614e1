"""What a request may ask of the sampler, validated once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvserve.log import RequestError

MAX_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling settings of one request; names and defaults are vLLM's.

    ``max_tokens=None`` means "up to the model's context". ``kv_policy`` overrides the engine's
    policy for this request: a name or ``{"name": ..., **fields}``.
    Raises ``RequestError`` naming the field that is out of range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    kv_policy: str | Mapping[str, Any] | None = None
    stop_strings: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop_strings", stop)
        checks = (
            ("n", 1 <= self.n <= 128, "between 1 and 128"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= -1, "-1 or 0 (off), or at least 1"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("stop", all(stop), "non-empty strings"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a 64-bit integer"),
            ("logprobs", _in_range(self.logprobs), f"between 0 and {MAX_LOGPROBS}"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", self.repetition_penalty > 0.0, "above 0"),
        )
        for name, ok, allowed in checks:
            if not ok:
                raise RequestError(
                    f"{name} must be {allowed}, got {getattr(self, name)!r}", param=name
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        self._refuse_unbuilt()

    def _refuse_unbuilt(self) -> None:
        """A field that is accepted but does nothing would be a lie: refuse it by name."""
        unbuilt = (
            ("prompt_logprobs", self.prompt_logprobs is not None),
            ("presence_penalty", self.presence_penalty != 0.0),
            ("frequency_penalty", self.frequency_penalty != 0.0),
            ("repetition_penalty", self.repetition_penalty != 1.0),
            ("logit_bias", bool(self.logit_bias)),
        )
        for name, used in unbuilt:
            if used:
                raise RequestError(f"{name} is not supported yet; leave it out", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _in_range(logprobs: int | None) -> bool:
    return logprobs is None or 0 <= logprobs <= MAX_LOGPROBS
