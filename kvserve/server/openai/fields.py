"""Request fields that may come in several shapes; each is read into one shape."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast, PlainValidator

from kvserve.log import RequestError, shown

_MOST_VALUES = {
    **dict.fromkeys(("messages", "input"), 2**17),
    **dict.fromkeys(("tools", "system", "instructions"), 2**16),
    **dict.fromkeys(("structured_outputs", "response_format", "text", "guided_json"), 2**15),
    **dict.fromkeys(("guided_regex", "guided_grammar", "chat_template", "metadata", "user"), 1000),
    **{"prompt": 2**21, "tokens": 2**17, "logit_bias": 2**16, "allowed_token_ids": 2**18},
    **{"guided_choice": 10_000, "chat_template_kwargs": 10_000},
}
"""Fields that may be long, and how many values (texts, numbers, lists, ...) they may hold."""
_MOST_LISTS = {"prompt": 2**13}
_FEW_VALUES, _FEW_LISTS, _FEW_BYTES = 128, 2**15, 2**16


def check_size(name: str, size: int, values: int, lists: int, context: int) -> None:
    """Refuse a field of ``size`` bytes with so many values and lists or objects among them.

    It is read as far as it might be served: a message takes at least a token of the context.
    """
    most = _MOST_VALUES.get(name, _FEW_VALUES)
    if name in ("messages", "input"):
        most = min(most, max(4 * context, 2**14))
    for what, found, limit in (
        ("values", values, most),
        ("lists and objects", lists, min(most, _MOST_LISTS.get(name, _FEW_LISTS))),
        ("bytes", size, size if name in _MOST_VALUES else _FEW_BYTES),
    ):
        if found > limit:
            message = f"{name} holds {found} {what}, and at most {limit} are read"
            raise RequestError(message, param=name)


def _is_token_ids(value: Any) -> bool:
    """Whether these are token ids that fit the engine's messages; the engine checks the ids.

    There may be millions, for which all other requests wait: so no loop of Python's.
    """
    if not isinstance(value, list) or (value and type(value[0]) is not int):
        return False
    return not value or (
        set(map(type, value)) == {int} and min(value) > -(2**31) and max(value) < 2**31
    )


def _parse_prompt(value: Any) -> list[str | list[int]]:
    """Any of the four forms of ``prompt`` -> a list of texts or of token id lists."""
    if isinstance(value, str) or _is_token_ids(value):
        prompts = [value]
    elif isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(map(_is_token_ids, value))
    ):
        prompts = value
    else:
        raise RequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of token id "
            "lists"
        )
    for i, prompt in enumerate(prompts):
        if not prompt:
            where = f"prompt[{i}]" if len(prompts) > 1 else "prompt"
            raise RequestError(f"{where} must not be empty", code="empty_prompt")
    return prompts


def _parse_stop(value: Any) -> list[str]:
    stop = [value] if isinstance(value, str) else value
    if stop is None:
        return []
    if not isinstance(stop, list) or not all(isinstance(item, str) for item in stop):
        raise RequestError("stop must be a string or a list of strings")
    return stop


def _parse_kv_policy(value: Any) -> str | dict[str, Any] | None:
    if value is None or isinstance(value, dict) or (isinstance(value, str) and len(value) < 1000):
        return value
    raise RequestError('kv_policy must be a name or an object like {"name": "kara", "window": 512}')


def _parse_logit_bias(value: Any) -> dict[int, float] | None:
    """Token ids may be strings: JSON has no other keys. Reports only the first wrong entry."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError("logit_bias must map token ids to numbers")
    bias = {}
    for key, number in value.items():
        token = key if type(key) is int else _token_id(key)
        if token is None or isinstance(number, bool) or not isinstance(number, int | float):
            raise RequestError(
                f"logit_bias must map token ids to numbers, got {shown(key)}: {shown(number)}"
            )
        bias[token] = float(number)
    return bias


def _token_id(key: Any) -> int | None:
    """A token id that is written as a string."""
    if isinstance(key, str) and len(key) <= 12:
        with suppress(ValueError):
            return int(key)
    return None


class FirstFault(FailFast):
    """Reports only the first wrong item of a list, not a million errors."""

    __hash__ = object.__hash__


TokenIds = Annotated[list[int], FirstFault()]
DistinctIds = Annotated[list[int], FirstFault(), AfterValidator(lambda ids: [*dict.fromkeys(ids)])]
Strings = Annotated[list[str], FirstFault()]
LogitBias = Annotated[
    dict[int, float] | None,
    PlainValidator(_parse_logit_bias, json_schema_input_type=dict[int, float] | None),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(
        _parse_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]
Stop = Annotated[
    list[str], PlainValidator(_parse_stop, json_schema_input_type=str | list[str] | None)
]
Content = Annotated[
    str,
    PlainValidator(lambda value: value, json_schema_input_type=str | list[dict[str, Any]] | None),
]
"""A text, or parts that ``ChatPrompt`` reads: what they may be depends on the others."""
KVPolicy = Annotated[
    str | dict[str, Any] | None,
    PlainValidator(_parse_kv_policy, json_schema_input_type=str | dict[str, Any] | None),
]
