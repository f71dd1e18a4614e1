"""What clients get back, as plain dictionaries for speed: a stream builds one per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
from fastapi.responses import Response

from kvserve.outputs import CompletionOutput, KVCacheDetails, RequestOutput
from kvserve.server.openai.logprobs import Echo, completion_logprobs
from kvserve.server.parsers.tool_parsers import Json
from kvserve.stats import STATS, EngineStats


def json_response(data: Any) -> Response:
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    return Response(orjson.dumps(data, default=str, option=options), media_type="application/json")


def usage(outputs: Sequence[RequestOutput], reasoning_tokens: int = 0) -> Json:
    """Token counts of one HTTP request, and what its policy did to the cache."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    counts = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "kv_cache_details": _summed([output.kv_cache_details for output in outputs]),
    }
    total = None
    for output in outputs:
        if output.speculation is not None:
            total = output.speculation.plus(total)
    return counts if total is None else {**counts, "speculation": asdict(total)}


def _summed(details: Sequence[KVCacheDetails]) -> Json:
    first, *rest = (asdict(item) for item in details)
    for other in rest:
        for name, value in other.items():
            if name != "policy":
                first[name] += value
    return first


# ---- whole answers ----------------------------------------------------------------------------


def completion(head: Json, outputs: Sequence[RequestOutput], choices: list[Json]) -> Json:
    return {**head, "object": "text_completion", "choices": choices, "usage": usage(outputs)}


def completion_choice(
    index: int, choice: CompletionOutput, top: int, echo: Echo | None, as_ids: bool
) -> Json:
    return {
        "index": index,
        "text": ("" if echo is None else echo.text) + choice.text,
        "logprobs": completion_logprobs(choice, top, echo=echo, as_ids=as_ids),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def chat_completion(
    head: Json, output: RequestOutput, choices: list[Json], reasoning_tokens: int
) -> Json:
    counts = usage([output], reasoning_tokens)
    return {**head, "object": "chat.completion", "choices": choices, "usage": counts}


def chat_choice(
    choice: CompletionOutput, logprobs: Json | None, message: Json, reason: str | None
) -> Json:
    return {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
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


def kv_stats(stats: EngineStats, *, for_page: bool = False) -> Json:
    """``GET /v1/kv/stats``: the pool, and what each running request holds of it."""
    body: Json = {"continuations": {"misses": dict(stats.continuation_misses)}, "speculation": {}}
    for name, stat in STATS.items():
        if stat.shown and (for_page or not stat.for_page):
            group, _, shown = stat.shown.rpartition(".")
            (body[group] if group else body)[shown] = getattr(stats, name)
    return {**body, "requests": stats.requests}
