"""The types of sampling settings, for those who call from Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from kvserve.log import RequestError, shown

_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_WHOLE = ("n", "top_k", "min_tokens", "priority")
_WHOLE_OR_NONE = (
    *("max_tokens", "seed", "logprobs", "prompt_logprobs"),
    *("thinking_start", "thinking_end", "thinking_token_budget"),
)


def check_types(settings: Any) -> None:
    """``RequestError`` for the first field of a ``SamplingParams`` that has the wrong type."""
    single: tuple[tuple[tuple[str, ...], Any, bool, str], ...] = (
        (_NUMBERS, Real, False, "a number"),
        (_WHOLE, Integral, False, "an integer"),
        (_WHOLE_OR_NONE, Integral, True, "an integer or None"),
        (("logit_bias",), Mapping, True, "a mapping of token ids to numbers"),
        (("client",), str, False, "a string"),
    )
    for names, kind, none, wanted in single:
        for name in names:
            value = getattr(settings, name)
            if not (isinstance(value, kind) or (none and value is None)):
                _refuse(name, wanted, value)
    several: tuple[tuple[str, Any, str], ...] = (
        ("stop_token_ids", Integral, "a list of token ids"),
        ("allowed_token_ids", Integral, "a list of token ids"),
        ("logit_bias", Integral, "a mapping of token ids to numbers"),
        ("bad_words", str, "a list of strings"),
        ("stop", str, "a string or a list of strings"),
    )
    for name, kind, wanted in several:
        value = getattr(settings, name)
        items = () if value is None else value
        if not isinstance(items, Iterable) or not _all_are(items, kind):
            _refuse(name, wanted, value)
    if not _all_are((settings.logit_bias or {}).values(), Real):
        _refuse("logit_bias", "a mapping of token ids to numbers", settings.logit_bias)


def _all_are(items: Iterable[Any], kind: Any) -> bool:
    """Whether all are of a kind. There may be 200,000, so each type is looked at once."""
    return all(issubclass(each, kind) for each in set(map(type, items)))


def _refuse(name: str, wanted: str, value: object) -> None:
    raise RequestError(f"{name} must be {wanted}, got {shown(value):.200}", param=name)
