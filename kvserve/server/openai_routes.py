"""The OpenAI-compatible routes: completions, chat completions and models."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvserve.sampling_params import SamplingParams
from kvserve.server.generation import Generation
from kvserve.server.prompts import check_lengths, decode, encode, encode_chat
from kvserve.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from kvserve.server.responses import (
    Json,
    chat_choice,
    chat_completion,
    completion,
    completion_choice,
    json_response,
    model_card,
)
from kvserve.server.state import ServerState
from kvserve.server.streaming import ChatChunks, CompletionChunks, stream_response

router = APIRouter(prefix="/v1", tags=["OpenAI"])


@router.post("/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    state, model, params = _admit(body, request)
    request_id = _request_id(body, request, "cmpl")
    prompts = await encode(state, body.prompt, body.add_special_tokens)
    check_lengths(state, body, prompts)
    echoed = _echoed(state, body)
    generation = Generation(state, prompts, params, request_id)
    if body.stream:
        chunks = CompletionChunks(body, request_id, model, len(prompts), echoed=echoed)
        return await stream_response(
            generation, chunks, request.receive, state.options.ping_interval
        )
    outputs = await generation.finish(request.receive)
    choices = []
    for i, output in enumerate(outputs):
        for choice in output.outputs:
            part = completion_choice(
                i * params.n + choice.index,
                choice,
                params.logprobs or 0,
                echoed[i] if echoed else None,
            )
            if body.return_token_ids:
                part["token_ids"] = choice.token_ids
                part["prompt_token_ids"] = output.prompt_token_ids
            choices.append(part)
    return json_response(completion(_head(request_id, model), outputs, choices))


@router.post("/chat/completions")
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    state, model, params = _admit(body, request)
    request_id = _request_id(body, request, "chatcmpl")
    prompts = [await encode_chat(state, body)]
    check_lengths(state, body, prompts)
    generation = Generation(state, prompts, params, request_id)
    if body.stream:
        chunks = ChatChunks(body, request_id, model, len(prompts))
        return await stream_response(
            generation, chunks, request.receive, state.options.ping_interval
        )
    [output] = await generation.finish(request.receive)
    choices = []
    for choice in output.outputs:
        part = chat_choice(choice, params.logprobs or 0)
        if body.return_token_ids:
            part["token_ids"] = choice.token_ids
        choices.append(part)
    answer = chat_completion(_head(request_id, model), output, choices)
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    return json_response(answer)


@router.get("/models")
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    state: ServerState = request.app.state.server
    state.check_ready()
    return json_response(
        {"object": "list", "data": [_card(state, name) for name in state.options.served_names]}
    )


@router.get("/models/{name:path}")
async def get_model(name: str, request: Request) -> Response:
    state: ServerState = request.app.state.server
    state.check_ready()
    return json_response(_card(state, state.check_model(name)))


# ---- steps ------------------------------------------------------------------------------------


def _admit(body: GenerationRequest, request: Request) -> tuple[ServerState, str, SamplingParams]:
    """Refuse what can be refused without looking at the prompt."""
    state: ServerState = request.app.state.server
    state.check_health()
    model = state.check_model(body.model)
    state.check_policy(body.kv_policy)
    return state, model, body.sampling_params(state.default_sampling)


def _request_id(body: GenerationRequest, request: Request, prefix: str) -> str:
    """A ``request_id`` in the body wins over the header, and is what ``X-Request-Id`` says then."""
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return f"{prefix}-{request.state.request_id}"


def _echoed(state: ServerState, body: CompletionRequest) -> list[str] | None:
    """Texts that ``echo`` puts before the completions."""
    if not body.echo:
        return None
    return [
        prompt if isinstance(prompt, str) else decode(state, prompt, "prompt")
        for prompt in body.prompt
    ]


def _head(request_id: str, model: str) -> Json:
    return {"id": request_id, "created": int(time.time()), "model": model}


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return model_card(name, state.config.model.model, state.started, state.engine.max_model_len)
