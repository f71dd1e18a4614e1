"""``--speculative-config``: which tokens are guessed, with vLLM's keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.log import ConfigError, shown
from kvserve.setting_values import did_you_mean

NGRAM, DRAFT_MODEL = "ngram", "draft_model"
_COMMON = ("method", "num_speculative_tokens")
_KEYS = {
    NGRAM: (*_COMMON, "prompt_lookup_min", "prompt_lookup_max"),
    DRAFT_MODEL: (*_COMMON, "model", "kv_policy"),
}
_MOST_TOKENS, _MOST_LOOKUP = 32, 32
_DEFAULT_LOOKUP = 5


@dataclass(frozen=True)
class SpeculativeConfig:
    """Guess at most ``num_speculative_tokens``: with ``draft_model`` that second model's, with
    ``ngram`` what followed the newest ``prompt_lookup_max`` to ``prompt_lookup_min`` tokens
    before."""

    num_speculative_tokens: int
    prompt_lookup_min: int = _DEFAULT_LOOKUP
    prompt_lookup_max: int = _DEFAULT_LOOKUP
    draft_model: str | None = None
    draft_policy: str | Mapping[str, Any] | None = None
    """What bounds the draft model's own cache."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeculativeConfig | None:
        """Read the setting; ``None`` if it is empty. ``ConfigError`` names the key."""
        if not given:
            return None
        method = given.get("method")
        if method not in _KEYS:
            raise wrong("method", f"must be {' or '.join(_KEYS)}, got {shown(method)}")
        _check_keys(given, method)
        tokens = _number(given, "num_speculative_tokens", None, _MOST_TOKENS)
        if method == DRAFT_MODEL:
            name = given.get("model")
            if not isinstance(name, str) or not name:
                raise wrong("model", f"must name a checkpoint, got {shown(name)}")
            policy = given.get("kv_policy")
            if policy is not None and not isinstance(policy, (str, Mapping)):
                expected = "must be a policy's name or an object with its name"
                raise wrong("kv_policy", f"{expected}, got {shown(policy)}")
            return cls(tokens, draft_model=name, draft_policy=policy)
        least, most = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
        default = _DEFAULT_LOOKUP if least is None and most is None else None
        shortest = _number(given, "prompt_lookup_min", default or most, _MOST_LOOKUP)
        longest = _number(given, "prompt_lookup_max", default or least, _MOST_LOOKUP)
        if shortest > longest:
            raise wrong("prompt_lookup_min", f"{shortest} exceeds prompt_lookup_max, {longest}")
        return cls(tokens, shortest, longest)


def _check_keys(given: Mapping[str, Any], method: str) -> None:
    for key in given:
        others = [name for name, keys in _KEYS.items() if key in keys]
        if key not in _KEYS[method] and others:
            raise wrong(key, f"belongs to the method {others[0]}, not to {method}")
        if not others:
            raise wrong(key, f"is unknown{did_you_mean(key, _KEYS[method])}")


def _number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> int:
    value = given.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise wrong(key, f"must be a whole number from 1 to {most}, got {shown(value)}")
    return value


def wrong(key: str, what: str) -> ConfigError:
    """What is wrong with one of the keys."""
    return ConfigError(f"--speculative-config: {key}: {what}")
