"""What clients get back, as plain dictionaries for speed: a stream builds one per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
from fastapi.responses import Response

from kvserve.outputs import CompletionOutput, EngineStats, KVCacheDetails, RequestOutput
from kvserve.server.openai.logprobs import Echo, completion_logprobs
from kvserve.server.parsers.tool_parsers import Json


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


def completion_choice(index: int, choice: CompletionOutput, top: int, echo: Echo | None) -> Json:
    return {
        "index": index,
        "text": ("" if echo is None else echo.text) + choice.text,
        "logprobs": completion_logprobs(choice, top, echo=echo),
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
        "speculation": {
            "drafted_tokens_total": stats.draft_tokens_total,
            "accepted_tokens_total": stats.accepted_tokens_total,
        },
        "requests": stats.requests,
    }
