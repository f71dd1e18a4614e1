"""JSON answers, and the counts in them, as plain dictionaries for speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import orjson
from fastapi.responses import Response

from kvserve.outputs import KVCacheDetails, RequestOutput
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
            if not isinstance(value, str):  # policy and table are the same for all
                first[name] += value
    return first


def kv_stats(stats: EngineStats, *, for_page: bool = False) -> Json:
    """``GET /v1/kv/stats``: the pool, and what each running request holds of it."""
    body: Json = {"continuations": {"misses": dict(stats.continuation_misses)}, "speculation": {}}
    for name, stat in STATS.items():
        if stat.shown and (for_page or not stat.for_page):
            group, _, shown = stat.shown.rpartition(".")
            (body[group] if group else body)[shown] = getattr(stats, name)
    return {**body, "requests": stats.requests}
