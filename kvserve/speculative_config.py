"""``--speculative-config``: which tokens are guessed, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.log import ConfigError, shown
from kvserve.setting_values import did_you_mean

NGRAM = "ngram"
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_MOST_TOKENS, _MOST_LOOKUP = 32, 32
_DEFAULT_LOOKUP = 5


@dataclass(frozen=True)
class SpeculativeConfig:
    """Guess at most ``num_speculative_tokens``: what followed the newest ``prompt_lookup_max`` to
    ``prompt_lookup_min`` tokens before."""

    num_speculative_tokens: int
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    prompt_lookup_max: int = _DEFAULT_LOOKUP

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig | None:
        """Read the setting; ``None`` if it is empty. ``ConfigError`` names the key."""
        if not given:
            return None
        method = given.get("method")
        if method != NGRAM:
            why = "kvserve guesses by n-grams of the sequence itself, without a second model"
            raise _wrong("method", f"must be {NGRAM}, got {shown(method)}: {why}")
        for key in given:
            if key not in _KEYS:
                raise _wrong(key, f"is unknown{did_you_mean(key, _KEYS)}")
        tokens = _number(given, "num_speculative_tokens", None, _MOST_TOKENS)
        least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        default = _DEFAULT_LOOKUP if least is None and most is None else None
        shortest = _number(given, "prompt_lookup_min", default or most, _MOST_LOOKUP)
        longest = _number(given, "prompt_lookup_max", default or least, _MOST_LOOKUP)
        if shortest > longest:
            raise _wrong("prompt_lookup_min", f"{shortest} exceeds prompt_lookup_max, {longest}")
        return cls(tokens, shortest, longest)


def _number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> int:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _wrong(key, f"must be a whole number from 1 to {most}, got {shown(value)}")
    return value


def _wrong(key: str, what: str) -> ConfigError:
    """What is wrong with one of the keys."""
    return ConfigError(f"--speculative-config: {key}: {what}")
