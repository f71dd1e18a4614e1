"""Log-probabilities in the forms of both APIs and of vLLM.

Long lists are encoded slice by slice into JSON text, since their dictionaries would take ten times
the memory, and the event loop would wait for one long call of the encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import orjson

from kvserve.outputs import CompletionOutput, Logprob, RequestOutput
from kvserve.server.parsers.tool_parsers import Json
from kvserve.server.state.engine_protocol import PromptTokenizer

_MIN_LOGPROB = -9999.0  # JSON has no -inf
_SLICE = 256
"""Tokens that are encoded at once."""

_Step = tuple[int, Mapping[int, Logprob], int]
TokenBytes = Callable[[int], bytes]


class _Columns(NamedTuple):
    """What the completions form says of some tokens, a list each."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass
class Echo:
    """A prompt that stands before its completions."""

    tokenizer: PromptTokenizer
    text: str
    as_ids: bool
    columns: list[bytes] = field(default_factory=list)
    """The prompt's part of each list of ``_Columns``, as JSON without brackets."""

    def encode(self, prompt: RequestOutput, top: int) -> None:
        """Encode the prompt's logprobs, once for all choices; the first token has none."""
        if prompt.prompt_logprobs is None or self.columns:
            return
        # Where each token begins in the text, which may lack the special tokens before it.
        ends = self.tokenizer.offsets(prompt.prompt_token_ids)
        missing = ends[-1] - len(self.text)
        offsets = iter([max(end - missing, 0) for end in ends[:-1]])
        token = prompt.prompt_token_ids[0]
        first = _as_id(token) if self.as_ids else self.tokenizer.token_text(token)
        start = _Columns([first], [None], [None], [next(offsets)])
        encoded = [[_inner(column)] for column in start]
        entries = (entry or {} for entry in islice(prompt.prompt_logprobs, 1, None))
        steps = zip(prompt.prompt_token_ids[1:], entries, offsets, strict=True)
        while some := list(islice(steps, _SLICE)):
            for parts, column in zip(encoded, _columns(some, top, self.as_ids), strict=True):
                parts.append(_inner(column))
        self.columns = [b",".join(parts) for parts in encoded]


def leave_prompt_only(output: RequestOutput) -> None:
    """Take out the one token that was generated only because the engine ends with one."""
    for choice in output.outputs:
        choice.text, choice.token_ids = "", []
        choice.logprobs = None if choice.logprobs is None else []
        choice.finish_reason, choice.stop_reason = choice.finish_reason and "length", None


def completion_logprobs(
    choice: CompletionOutput,
    top: int,
    start: int = 0,
    echo: Echo | None = None,
    as_ids: bool = False,
) -> Json | None:
    """Logprobs in the completions form from token ``start`` on; with ``as_ids`` tokens are
    ``token_id:N`` (``return_tokens_as_token_ids``).

    With an ``echo`` its text comes first; from the first token on its tokens do, too.
    """
    if choice.logprobs is None:
        return None
    steps = _steps(choice, start, 0 if echo is None else len(echo.text))
    columns = _columns(steps, top, as_ids)
    if echo is None or not echo.columns or start:
        return columns._asdict()
    joined = [
        orjson.Fragment(b"[%b%b%b]" % (prompt, b"," if steps else b"", _inner(column)))
        for prompt, column in zip(echo.columns, columns, strict=True)
    ]
    return dict(zip(_Columns._fields, joined, strict=True))


def chat_logprobs(
    choice: CompletionOutput,
    top: int,
    token_bytes: TokenBytes,
    start: int = 0,
    as_ids: bool = False,
) -> Json | None:
    """Logprobs in the chat form, from token ``start`` on; ``as_ids`` as above."""
    if choice.logprobs is None:
        return None

    def token(token_id: int, item: Logprob) -> Json:
        held = list(token_bytes(token_id))
        name = _as_id(token_id) if as_ids else item.decoded_token
        return {"token": name, "logprob": _finite(item), "bytes": held}

    content = (
        {
            **token(token_id, entry[token_id]),
            "top_logprobs": [token(*each) for each in _best(entry, top)],
        }
        for token_id, entry, _ in _steps(choice, start)
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


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _columns(steps: Iterable[_Step], top: int, as_ids: bool) -> _Columns:
    columns = _Columns([], [], [], [])
    for token_id, entry, offset in steps:
        sampled = entry[token_id]
        names: dict[str, float] = {}
        for other, item in [(token_id, sampled), *_best(entry, top)]:
            name = item.decoded_token
            if as_ids or (name in names and other != token_id):  # another has the same text
                name = _as_id(other)
            names[name] = _finite(item)
        columns.tokens.append(_as_id(token_id) if as_ids else sampled.decoded_token)
        columns.token_logprobs.append(_finite(sampled))
        columns.top_logprobs.append(names)
        columns.text_offset.append(offset)
    return columns


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


def _steps(choice: CompletionOutput, start: int, before: int = 0) -> list[_Step]:
    """Tokens, their log-probabilities, and where they begin behind ``before`` characters."""
    entries, offsets = choice.logprobs or [], choice.text_offsets or [0] * len(choice.token_ids)
    rows = zip(choice.token_ids[start:], entries[start:], offsets[start:], strict=False)
    return [(token, entry, before + offset) for token, entry, offset in rows]


def _best(entry: Mapping[int, Logprob], top: int) -> list[tuple[int, Logprob]]:
    """The ``top`` most probable; ``entry`` also has the sampled token, whatever its rank."""
    ranked = [(token, item) for token, item in entry.items() if item.rank <= top]
    return sorted(ranked, key=lambda pair: pair[1].rank)[:top]


def _finite(item: Logprob) -> float:
    return max(item.logprob, _MIN_LOGPROB)
