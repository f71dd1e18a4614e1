"""Log-probabilities in the forms of both APIs and of vLLM.

Long lists are encoded slice by slice into JSON text, since their dictionaries would take ten times
the memory, and the event loop would wait for one long call of the encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import orjson

from kvserve.outputs import CompletionOutput, Logprob, RequestOutput
from kvserve.server.parsers.tool_parsers import Json

_MIN_LOGPROB = -9999.0  # JSON has no -inf
_SLICE = 256
"""Tokens that are encoded at once."""

_Step = tuple[int, Mapping[int, Logprob]]


class _Columns(NamedTuple):
    """What the completions form says of some tokens, a list each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass
class Echo:
    """A prompt that stands before its completions; ``first`` is the text of its first token."""

    text: str
    first: str = ""
    columns: list[bytes] = field(default_factory=list)
    """The prompt's part of each list of ``_Columns``, as JSON without brackets."""
    end: int = 0
    """Where the text behind the prompt begins."""

    def encode(self, prompt: RequestOutput, top: int) -> None:
        """Encode the prompt's logprobs, once for all choices; the first token has none."""
        if prompt.prompt_logprobs is None or self.columns:
            return
        start = _Columns([self.first], [None], [None], [0])
        encoded = [[_inner(column)] for column in start]
        offset = len(self.first)
        entries = (entry or {} for entry in islice(prompt.prompt_logprobs, 1, None))
        steps = zip(prompt.prompt_token_ids[1:], entries, strict=True)
        while some := list(islice(steps, _SLICE)):
            columns, offset = _columns(some, top, offset)
            for parts, column in zip(encoded, columns, strict=True):
                parts.append(_inner(column))
        self.end = offset
        self.columns = [b",".join(parts) for parts in encoded]


def completion_logprobs(
    choice: CompletionOutput, top: int, start: int = 0, offset: int = 0, echo: Echo | None = None
) -> tuple[Json | None, int]:
    """Logprobs in the completions form from token ``start`` on, and where its text ends.

    Its text begins at ``offset``; with an encoded ``echo`` the prompt's tokens come first.
    """
    if choice.logprobs is None:
        return None, offset
    steps = _steps(choice, start)
    if echo is None or not echo.columns:
        columns, offset = _columns(steps, top, offset)
        return columns._asdict(), offset
    columns, offset = _columns(steps, top, echo.end)
    joined = [
        orjson.Fragment(b"[%b%b%b]" % (prompt, b"," if steps else b"", _inner(column)))
        for prompt, column in zip(echo.columns, columns, strict=True)
    ]
    return dict(zip(_Columns._fields, joined, strict=True)), offset


def chat_logprobs(choice: CompletionOutput, top: int, start: int = 0) -> Json | None:
    """Logprobs in the chat form, from token ``start`` on."""
    if choice.logprobs is None:
        return None
    content = (
        {**_chat_token(entry[token_id]), "top_logprobs": [*map(_chat_token, _best(entry, top))]}
        for token_id, entry in _steps(choice, start)
    )
    return {"content": _in_slices(content), "refusal": None}


def prompt_logprobs(output: RequestOutput) -> Any:
    """In vLLM's form: for each prompt token a map by token id, ``null`` for the first."""
    if output.prompt_logprobs is None:
        return None
    return _in_slices(
        None
        if entry is None
        else {
            str(token): {
                "logprob": _finite(item),
                "rank": item.rank,
                "decoded_token": item.decoded_token,
            }
            for token, item in entry.items()
        }
        for entry in output.prompt_logprobs
    )


def _columns(steps: Iterable[_Step], top: int, offset: int) -> tuple[_Columns, int]:
    """The lists for some tokens whose text begins at ``offset``, and where it ends."""
    columns = _Columns([], [], [], [])
    for token_id, entry in steps:
        sampled = entry[token_id]
        best = {item.decoded_token: _finite(item) for item in _best(entry, top)}
        columns.tokens.append(sampled.decoded_token)
        columns.token_logprobs.append(_finite(sampled))
        columns.top_logprobs.append({sampled.decoded_token: _finite(sampled), **best})
        columns.text_offset.append(offset)
        offset += len(sampled.decoded_token)
    return columns, offset


def _in_slices(items: Iterator[Any]) -> Any:
    """A list of the items if they are few, else its JSON text."""
    some = list(islice(items, _SLICE))
    if len(some) < _SLICE:
        return some
    parts = []
    while some:
        parts.append(_inner(some))
        some = list(islice(items, _SLICE))
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


def _inner(items: Any) -> bytes:
    """The items as JSON, without the brackets around them."""
    return orjson.dumps(items)[1:-1]


def _steps(choice: CompletionOutput, start: int) -> list[_Step]:
    logprobs = choice.logprobs or []
    return list(zip(choice.token_ids[start:], logprobs[start:], strict=False))


def _best(entry: Mapping[int, Logprob], top: int) -> list[Logprob]:
    """The ``top`` most probable; ``entry`` also has the sampled token, whatever its rank."""
    return sorted(
        (item for item in entry.values() if item.rank <= top), key=lambda item: item.rank
    )[:top]


def _finite(item: Logprob) -> float:
    return max(item.logprob, _MIN_LOGPROB)


def _chat_token(item: Logprob) -> Json:
    token = item.decoded_token
    return {"token": token, "logprob": _finite(item), "bytes": list(token.encode())}
