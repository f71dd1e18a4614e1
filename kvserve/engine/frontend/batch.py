"""Reads what callers give to ``LLM.generate`` and ``LLM.chat``; errors name the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from kvserve.log import RequestError, shown
from kvserve.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]


def read_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or many, as a list. ``RequestError`` names one that is neither text nor ids."""
    if _is_prompt(prompts):
        return [prompts]
    if not _is_list(prompts):
        raise _wrong("prompts", "a text, a list of token ids, or a list of these", prompts)
    for at, prompt in enumerate(prompts):
        if not _is_prompt(prompt) and not (_is_list(prompt) and len(prompt) == 0):
            raise _wrong(f"prompts[{at}]", "a text or a list of token ids", prompt)
    return list(prompts)


def read_params(params: Any, count: int, defaults: Mapping[str, Any]) -> list[SamplingParams]:
    """Settings for each of ``count`` prompts; ``defaults`` make them if there are none."""
    if params is None:
        params = SamplingParams(**defaults)
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params):
        raise _wrong("sampling_params", "a SamplingParams, or a list of them", params)
    for at, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise _wrong(f"sampling_params[{at}]", "a SamplingParams", one)
    if len(params) != count:
        raise ValueError(f"{count} prompts but {len(params)} sampling_params")
    return list(params)


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


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return True
    ids = _is_list(value) and len(value) > 0
    return ids and all(isinstance(i, Integral) and not isinstance(i, bool) for i in value)


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    field = name.partition("[")[0]
    return RequestError(f"{name} must be {wanted}, got {shown(value):.200}", param=field)
