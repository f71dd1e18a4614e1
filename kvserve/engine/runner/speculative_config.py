"""Reads ``--speculative-config``: how next tokens are guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvserve.fields import did_you_mean, number_wanted
from kvserve.log import ConfigError, shown
from kvserve.scheduler.speculation.speculation import NgramSettings

_NGRAM = "ngram"
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
_MOST_TOKENS, _MOST_LOOKUP = 32, 32
_DEFAULT_LOOKUP = 5
_MOST_ROWS = {"cpu": 4, "cuda": 16}
"""Rows that decode in a step with guesses: 6 w. On CPUs w is 1.2 (an EPYC) and 3.4 (a Xeon), as one
row's token and five right guesses took 3.2 and 2.1 times as long as a plain step
(docs/speculation.md). Half of the smaller is taken, since sixteen guesses say little of the next.
It has not been measured on a GPU, where it is larger by far, but steps that guess do not overlap.
"""


def read_speculation(given: Mapping[str, Any], device: str) -> NgramSettings:
    """What ``speculative_config`` says, if it says anything. ``ConfigError`` names the key."""
    method = given.get("method")
    if method != _NGRAM:
        why = "kvserve guesses by n-grams of the sequence itself, without a second model"
        raise _wrong("method", f"must be {_NGRAM}, got {shown(method)}: {why}")
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
    rows = _MOST_ROWS["cpu" if device == "cpu" else "cuda"]
    return NgramSettings(tokens, shortest, longest, rows)


def _number(given: Mapping[str, Any], key: str, default: int | None, most: int) -> int:
    value: Any = given.get(key)
    value = default if value is None else value
    if (wanted := number_wanted(value, int, 1, most)) is not None:
        raise _wrong(key, f"must be {wanted}, got {shown(value)}")
    number: int = value
    return number


def _wrong(key: str, what: str) -> ConfigError:
    """What is wrong with one of the keys."""
    return ConfigError(f"--speculative-config: {key}: {what}")
