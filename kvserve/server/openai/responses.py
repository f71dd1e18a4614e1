"""What clients get back, as plain dictionaries for speed: a stream builds one per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import orjson
from fastapi.responses import Response

from kvserve.outputs import CompletionOutput, EngineStats, KVCacheDetails, Logprob, RequestOutput
from kvserve.server.parsers.tool_parsers import Json

_MIN_LOGPROB = -9999.0  # JSON has no -inf


def json_response(data: Any) -> Response:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return Response(orjson.dumps(data, default=str, option=options), media_type="application/json")


def usage(outputs: Sequence[RequestOutput], reasoning_tokens: int = 0) -> Json:
    """Token counts of one HTTP request, and what its policy did to the cache."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "kv_cache_details": _summed([output.kv_cache_details for output in outputs]),
    }


def _summed(details: Sequence[KVCacheDetails]) -> Json:
    first, *rest = (asdict(item) for item in details)
    for other in rest:
        for name, value in other.items():
            if name != "policy":
                first[name] += value
    return first


# ---- log probabilities ------------------------------------------------------------------------


@dataclass(frozen=True)
class Echo:
    """A prompt that stands before its completions; ``first`` is the text of its first token."""

    text: str
    first: str = ""


def completion_logprobs(
    choice: CompletionOutput,
    top: int,
    start: int = 0,
    offset: int = 0,
    echo: Echo | None = None,
    prompt: RequestOutput | None = None,
) -> Json | None:
    """Logprobs in the completions form, from token ``start`` on, whose text begins at ``offset``.

    With ``echo`` the tokens of ``prompt`` come first; the first of them has no logprob.
    """
    if choice.logprobs is None:
        return None
    tokens: list[str] = []
    chosen: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    steps = _steps(choice, start)
    if echo is not None and prompt is not None and prompt.prompt_logprobs is not None:
        tokens, chosen, tops, offsets = [echo.first], [None], [None], [offset]
        offset += len(echo.first)
        entries = [entry or {} for entry in prompt.prompt_logprobs[1:]]
        steps = [*zip(prompt.prompt_token_ids[1:], entries, strict=True), *steps]
    for token_id, entry in steps:
        sampled = entry[token_id]
        tokens.append(sampled.decoded_token)
        chosen.append(_finite(sampled))
        best = {item.decoded_token: _finite(item) for item in _best(entry, top)}
        tops.append({sampled.decoded_token: _finite(sampled), **best})
        offsets.append(offset)
        offset += len(sampled.decoded_token)
    return {
        "tokens": tokens,
        "token_logprobs": chosen,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(choice: CompletionOutput, top: int, start: int = 0) -> Json | None:
    """Logprobs in the chat form, from token ``start`` on."""
    if choice.logprobs is None:
        return None
    content = [
        {**_chat_token(entry[token_id]), "top_logprobs": [*map(_chat_token, _best(entry, top))]}
        for token_id, entry in _steps(choice, start)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(output: RequestOutput) -> list[Json | None] | None:
    """In vLLM's form: for each prompt token a map by token id, ``null`` for the first."""
    if output.prompt_logprobs is None:
        return None
    return [
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
    ]


def _steps(choice: CompletionOutput, start: int) -> list[tuple[int, Mapping[int, Logprob]]]:
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


# ---- whole answers ----------------------------------------------------------------------------


def completion(head: Json, outputs: Sequence[RequestOutput], choices: list[Json]) -> Json:
    return {**head, "object": "text_completion", "choices": choices, "usage": usage(outputs)}


def completion_choice(
    index: int, choice: CompletionOutput, top: int, echo: Echo | None, prompt: RequestOutput
) -> Json:
    return {
        "index": index,
        "text": ("" if echo is None else echo.text) + choice.text,
        "logprobs": completion_logprobs(choice, top, echo=echo, prompt=prompt),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def chat_completion(
    head: Json, output: RequestOutput, choices: list[Json], reasoning_tokens: int
) -> Json:
    counts = usage([output], reasoning_tokens)
    return {**head, "object": "chat.completion", "choices": choices, "usage": counts}


def chat_choice(choice: CompletionOutput, top: int, message: Json, reason: str | None) -> Json:
    return {
        "index": choice.index,
        "message": message,
        "logprobs": chat_logprobs(choice, top),
        "finish_reason": reason,
        "stop_reason": choice.stop_reason,
    }


def model_card(name: str, root: str, created: int, max_model_len: int) -> Json:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "kvserve",
        "root": root,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [],
    }


def kv_stats(stats: EngineStats) -> Json:
    """``GET /v1/kv/stats``: the pool, and what each running request holds of it."""
    return {
        "blocks_total": stats.blocks_total,
        "blocks_free": stats.blocks_free,
        "blocks_cached": stats.blocks_cached,
        "bytes_total": stats.bytes_total,
        "bytes_held": stats.bytes_held,
        "tokens_logical": stats.tokens_logical,
        "tokens_held": stats.tokens_held,
        "tokens_evicted_total": stats.tokens_evicted_total,
        "compactions_total": stats.compactions_total,
        "blocks_released_total": stats.blocks_released_total,
        "preemptions_total": stats.preemptions_total,
        "num_running": stats.num_running,
        "num_waiting": stats.num_waiting,
        "continuations": {
            "count": stats.continuations,
            "blocks": stats.continuation_blocks,
            "in_host_memory": stats.hosted_continuations,
            "resumed_total": stats.resumed_total,
            "resumed_from_host_total": stats.resumed_from_host_total,
            "resumed_tokens_total": stats.resumed_tokens_total,
            "misses": dict(stats.continuation_misses),
        },
        "requests": stats.requests,
    }
