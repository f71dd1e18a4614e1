"""Routes for operators of the server: deep health, load, aborts and the prefix cache."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from kvserve.sampling_params import SamplingParams
from kvserve.server.http.json_body import JsonRoute
from kvserve.server.http.schemas import Status, answers
from kvserve.server.openai.fields import Strings
from kvserve.server.openai.responses import json_response
from kvserve.server.state.errors import ApiError, unavailable
from kvserve.server.state.generation import Generation
from kvserve.server.state.server_state import ServerState

router = APIRouter(tags=["operations"], route_class=JsonRoute)

_PROBE_SECONDS = 20.0
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, kv_policy="none")


class AbortRequest(BaseModel):
    request_ids: Strings


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


@router.get("/health_generate", responses=answers(Status))
async def health_generate(request: Request) -> Response:
    """200 once the model has generated a token; 503 if none comes in 20 s, as on a hung device."""
    state = _state(request)
    state.check_health()
    generation = Generation(state, [[0]], _PROBE, f"health-{request.state.request_id}")
    try:
        await asyncio.wait_for(generation.finish(request.receive, len), _PROBE_SECONDS)
    except asyncio.TimeoutError:
        raise unavailable(f"no token within {_PROBE_SECONDS:g} s", "engine_stuck") from None
    return json_response({"status": "ok"})


@router.get("/load")
async def load(request: Request) -> Response:
    """How busy the server is."""
    state = _state(request)
    state.check_ready()
    stats = state.engine.stats
    return json_response(
        {
            "server_load": len(state.generations),
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_cache_usage,
        }
    )


@router.post("/abort_requests")
async def abort_requests(body: AbortRequest, request: Request) -> Response:
    """End requests by their ids, as in their answers or in ``X-Request-Id``; ignores unknown ids.

    The clients of these requests get an error with code ``aborted``.
    """
    state = _state(request)
    state.check_ready()
    wanted = set(body.request_ids)
    aborted = []
    for generation in list(state.generations):
        bare = generation.request_id.partition("-")[2]
        if wanted & {generation.request_id, bare}:
            generation.fail(ApiError(499, "the request was aborted", code="aborted"))
            aborted.append(generation.request_id)
    return json_response({"aborted": aborted})


@router.post("/reset_prefix_cache", responses=answers(Status))
@router.post("/flush_cache", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prompt blocks and continuations; requests sent after the answer find none."""
    state = _state(request)
    state.check_health()
    state.engine.reset_prefix_cache()
    return json_response({"status": "ok"})


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens, sizes and the chat template."""
    state = _state(request)
    state.check_ready()
    described = state.require_tokenizer("tokenizer").describe()
    template = state.options.chat_template
    return json_response({**described, **({"chat_template": template} if template else {})})
