"""Routes about the server itself: health, metrics, settings, the tokenizer and the KV cache.

Those for operators: deep health, load, aborts and the prefix cache.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel

import kvserve
from kvserve.engine.messages import PolicyOffer
from kvserve.log import RequestError
from kvserve.sampling_params import SamplingParams
from kvserve.server.http.json_body import JsonRoute
from kvserve.server.http.schemas import Status, Text, Tokens, answers
from kvserve.server.openai.chat_protocol import TokenizeChatRequest
from kvserve.server.openai.fields import Strings
from kvserve.server.openai.prompts import decode_long, encode, encode_chat
from kvserve.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from kvserve.server.openai.responses import json_response, kv_stats
from kvserve.server.state.beside import beside, in_thread
from kvserve.server.state.errors import ApiError, unavailable
from kvserve.server.state.generation import Generation
from kvserve.server.state.server_state import ServerState

router = APIRouter(tags=["server"], route_class=JsonRoute)

_PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


_TEXT, _CHAT = TokenizeRequest, TokenizeChatRequest


def _either(*kinds: type[BaseModel]) -> dict[str, Any]:
    """What the document says of a body that is one of these; what they hold is described there."""
    place = "#/components/schemas/{model}"
    schemas = [kind.model_json_schema(ref_template=place) for kind in kinds]
    described = [{name: each for name, each in s.items() if name != "$defs"} for s in schemas]
    content = {"application/json": {"schema": {"anyOf": described}}}
    return {"requestBody": {"content": content, "required": True}}


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _ready(request: Request) -> ServerState:
    state = _state(request)
    state.check_ready()
    return state


@router.get("/health", responses=answers(Status))
@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
async def health(request: Request) -> Response:
    """200 when requests are answered; 503 while loading or draining, and without an engine."""
    state = _state(request)
    state.check_health()
    state.check_runs()
    return json_response({"status": "ok"})


@router.get("/version")
@router.head("/version", include_in_schema=False)
async def version() -> Response:
    return json_response({"version": kvserve.__version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text format; also while the model loads."""
    state = _state(request)
    return Response(state.metrics.render(), media_type=_PROMETHEUS_TEXT)


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """The resolved settings, and what is on or off and why."""
    state = _ready(request)
    engine, info = state.engine, state.engine.info
    return json_response(
        {
            "version": kvserve.__version__,
            "served_model_names": state.served_names,
            "max_model_len": info.max_model_len,
            "policy": {
                "name": info.policy_name,
                "args": dict(state.config.compression.policy_args),
            },
            "kv_cache": {
                "dtype": state.config.cache.kv_cache_dtype,
                "blocks_total": engine.stats.blocks_total,
                "bytes_total": engine.stats.bytes_total,
                "token_bytes": info.token_bytes,
            },
            "default_sampling": state.default_sampling,
            "kv_trace": state.settings.allow_kv_trace,
            "features": [
                {"feature": feature, "state": how, "why": why} for feature, how, why in info.summary
            ],
            "config": asdict(state.config),
        }
    )


# ---- tokenizer --------------------------------------------------------------------------------


@router.post("/tokenize", responses=answers(Tokens), openapi_extra=_either(_TEXT, _CHAT))
@router.post("/v1/tokenize", include_in_schema=False)
async def tokenize(body: TokenizeChatRequest | TokenizeRequest, request: Request) -> Response:
    """Token ids of a text (``prompt``), or of ``messages`` under the chat template."""
    state = _ready(request)
    state.check_model(body.model)
    if isinstance(body, TokenizeChatRequest):
        ids = await encode_chat(state, body)
    else:
        [ids] = await encode(state, [body.prompt], body.add_special_tokens, whole=True)

    def answer() -> Response:
        strings = None
        if body.return_token_strs:
            strings = list(map(state.require_tokenizer("prompt").token_text, ids))
        return json_response(
            {
                "count": len(ids),
                "max_model_len": state.engine.info.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    return await beside(answer)


@router.post("/detokenize", responses=answers(Text))
@router.post("/v1/detokenize", include_in_schema=False)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = _ready(request)
    state.check_model(body.model)
    return await beside(
        lambda: json_response({"prompt": decode_long(state, body.tokens, "tokens")})
    )


# ---- KV cache ---------------------------------------------------------------------------------


@router.get("/v1/kv/policies")
async def kv_policies(request: Request) -> Response:
    """Every policy with its arguments as JSON Schema; the server's own is ``default``.

    ``offer`` has arguments that do something on this server; ``refusal`` says why it cannot run.
    """
    state = _ready(request)
    offers = {offer.name: offer for offer in await state.engine.offers()}
    # `args` describes the same arguments in words.
    data = [
        {**{k: v for k, v in p.items() if k != "args"}, **_offer_of(state, offers.get(p["name"]))}
        for p in await in_thread(_describe_policies)
    ]
    return json_response({"default": state.engine.info.policy_name, "data": data})


def _describe_policies() -> list[dict[str, Any]]:
    """Beside the event loop: the first one who asks waits until torch is loaded."""
    from kvserve.engine.policies.registry import describe_policies

    return describe_policies()


def _offer_of(state: ServerState, offer: PolicyOffer | None) -> dict[str, Any]:
    if offer is None:
        return {"offer": {}, "refusal": None}
    refusal = offer.refusal
    if refusal is None:
        try:
            state.check_allowed(offer.name)
        except RequestError as error:
            refusal = str(error)
    return {"offer": offer.args, "refusal": refusal}


@router.get("/v1/kv/stats")
async def kv_cache_stats(request: Request) -> Response:
    """The block pool, and what each running request holds of it."""
    state = _ready(request)
    return json_response(kv_stats(state.engine.stats))


# ---- for operators ------------------------------------------------------------------------------


operations = APIRouter(tags=["operations"], route_class=JsonRoute)

_PROBE_SECONDS = 20.0
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, kv_policy="none")


class AbortRequest(BaseModel):
    request_ids: Strings


@operations.get("/health_generate", responses=answers(Status))
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


@operations.get("/load")
async def load(request: Request) -> Response:
    """How busy the server is."""
    state = _ready(request)
    stats = state.engine.stats
    return json_response(
        {
            "server_load": len(state.generations),
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": stats.kv_cache_usage,
        }
    )


@operations.post("/abort_requests")
async def abort_requests(body: AbortRequest, request: Request) -> Response:
    """End requests by their ids, as in their answers or in ``X-Request-Id``; ignores unknown ids.

    The clients of these requests get an error with code ``aborted``.
    """
    state = _ready(request)
    wanted = set(body.request_ids)
    aborted = []
    for generation in list(state.generations):
        bare = generation.request_id.partition("-")[2]
        if wanted & {generation.request_id, bare}:
            generation.fail(ApiError(499, "the request was aborted", code="aborted"))
            aborted.append(generation.request_id)
    return json_response({"aborted": aborted})


@operations.post("/reset_prefix_cache", responses=answers(Status))
@operations.post("/flush_cache", include_in_schema=False)
async def reset_prefix_cache(request: Request) -> Response:
    """Forget cached prompt blocks and continuations; requests sent after the answer find none."""
    state = _state(request)
    state.check_health()
    state.engine.reset_prefix_cache()
    return json_response({"status": "ok"})


@operations.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Special tokens, sizes and the chat template."""
    state = _ready(request)
    described = state.require_tokenizer("tokenizer").describe()
    template = state.chat_template
    return json_response({**described, **({"chat_template": template} if template else {})})
