"""Reads what callers give to ``LLM.generate`` and ``LLM.chat``; errors name the argument."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from numbers import Integral
from typing import Any, NamedTuple

from kvserve.log import RequestError, shown
from kvserve.sampling_params import SamplingParams, refused

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or one of vLLM's mappings: ``{"prompt": text}``, ``{"prompt_token_ids":
ids}``, which may have a ``cache_salt``."""
Messages = Sequence[dict[str, Any]]
_PROMPT = "a text, a list of token ids, or a mapping with prompt or prompt_token_ids"


class ReadPrompt(NamedTuple):
    """One prompt, and what is known beside it: the text that its ids were made of."""

    prompt: str | Sequence[int]
    text: str | None = None
    cache_salt: str | None = None


def read_prompts(prompts: Any) -> list[ReadPrompt]:
    """One prompt or many, as a list. ``RequestError`` names one that is none."""
    # An empty list is no prompts.
    if isinstance(prompts, str | Mapping) or (_is_ids(prompts) and len(prompts) > 0):
        return [read_prompt(prompts, "prompts")]
    if not _is_list(prompts):
        raise _wrong("prompts", f"{_PROMPT}, or a list of these", prompts)
    return [read_prompt(prompt, f"prompts[{at}]") for at, prompt in enumerate(prompts)]


def read_prompt(prompt: Any, name: str) -> ReadPrompt:
    """One prompt. ``RequestError`` calls it ``name`` if it is none."""
    if isinstance(prompt, str) or _is_ids(prompt):
        return ReadPrompt(prompt)
    if not isinstance(prompt, Mapping):
        raise _wrong(name, _PROMPT, prompt)
    known = ("prompt", "prompt_token_ids", "cache_salt")
    fields = prompt
    if not prompt.keys() <= set(known):
        from kvserve import absent

        fields = absent.take_known(prompt, known, absent.FIELDS, refused)
    text, ids, salt = (fields.get(each) for each in known)
    if not ((text is None or isinstance(text, str)) and (ids is None or _is_ids(ids))):
        raise _wrong(name, "a mapping whose prompt is a text and prompt_token_ids are ids", prompt)
    given = text if ids is None else ids
    if given is None:
        raise _wrong(name, _PROMPT, prompt)
    return ReadPrompt(given, text, salt)


def read_params(
    params: Any, prompts: Sequence[ReadPrompt], priority: Any, defaults: Mapping[str, Any]
) -> list[SamplingParams]:
    """Settings for each prompt, with its ``cache_salt`` and its priority; ``defaults`` make them
    if there are none."""
    if params is None:
        params = SamplingParams(**defaults)
    each = _one_each("sampling_params", params, SamplingParams, "a SamplingParams", len(prompts))
    ranks = _one_each("priority", priority, Integral, "an integer", len(prompts))
    made = []
    for one, prompt, rank in zip(each, prompts, ranks, strict=True):
        changes = {"cache_salt": prompt.cache_salt, "priority": rank}
        given = {name: value for name, value in changes.items() if value is not None}
        made.append(replace(one, **given) if given else one)
    return made


def _one_each(name: str, value: Any, kind: Any, wanted: str, count: int) -> list[Any]:
    if value is None or isinstance(value, kind):
        return [value] * count
    if not _is_list(value):
        raise _wrong(name, f"{wanted}, or a list of them", value)
    for at, one in enumerate(value):
        if not isinstance(one, kind):
            raise _wrong(f"{name}[{at}]", wanted, one)
    if len(value) != count:
        raise RequestError(f"{count} prompts but {len(value)} {name}", param=name)
    return list(value)


def refuse_others(method: Callable[..., Any], given: Mapping[str, Any], hint: str = "") -> None:
    """``RequestError`` for keywords that a method does not have."""
    if not given:
        return
    from kvserve import absent

    def error(message: str, name: str) -> RequestError:
        return refused(message.replace("unknown setting", "unknown argument") + hint, name)

    absent.take_known(given, signature(method).parameters, absent.FIELDS, error)


def read_conversations(messages: Any) -> list[Messages]:
    """One conversation or several, as a list."""
    if not _is_list(messages):
        raise _wrong("messages", "a list of messages, or a list of such lists", messages)
    one = len(messages) > 0 and isinstance(messages[0], Mapping)
    conversations = [messages] if one else list(messages)
    for at, conversation in enumerate(conversations):
        name = "messages" if one else f"messages[{at}]"
        if not _is_list(conversation):
            raise _wrong(name, "a list of messages", conversation)
        for place, message in enumerate(conversation):
            if not isinstance(message, Mapping):
                wanted = "a mapping like {'role': 'user', 'content': 'Hello'}"
                raise _wrong(f"{name}[{place}]", wanted, message)
    return conversations


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _is_ids(value: Any) -> bool:
    return _is_list(value) and all(
        type(i) is int or (isinstance(i, Integral) and not isinstance(i, bool)) for i in value
    )


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    field = name.partition("[")[0]
    return RequestError(f"{name} must be {wanted}, got {shown(value):.200}", param=field)
