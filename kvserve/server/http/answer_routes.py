"""The routes that answer: completions, chat and responses as OpenAI has them, messages as Anthropic
has them; and the list of models."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvserve.log import RequestError, log_once
from kvserve.server.anthropic.answer import MessageWriter
from kvserve.server.anthropic.request import MessagesRequest
from kvserve.server.http.json_body import JsonRoute
from kvserve.server.http.schemas import (
    ChatCompletion,
    Completion,
    Message,
    ModelCard,
    ModelList,
    ResponseBody,
    TokenCount,
    answers,
    streamed,
)
from kvserve.server.openai.chat import plan_chat
from kvserve.server.openai.chat_protocol import ChatCompletionRequest
from kvserve.server.openai.logprobs import Echo
from kvserve.server.openai.prompts import decode, encode, encode_chat, truncate
from kvserve.server.openai.protocol import CompletionRequest, GenerationRequest
from kvserve.server.openai.response_items import ResponseWriter
from kvserve.server.openai.responses import json_response
from kvserve.server.openai.responses_protocol import ResponsesRequest
from kvserve.server.openai.streaming import (
    AnswerWriter,
    ChatWriter,
    CompletionWriter,
    stream_response,
)
from kvserve.server.state.beside import CLIENT, beside
from kvserve.server.state.generation import Generation
from kvserve.server.state.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)
anthropic = APIRouter(prefix="/v1", tags=["Anthropic"], route_class=JsonRoute)

_HEADER_MOST = 1000
_NOT_IN_HEADERS = re.compile(r"[^\x20-\x7e]")
_UNSHOWN = ("kv_trace", "logprobs", "prompt_logprobs", "return_token_ids")
"""Fields of chat requests that answers of other APIs have no place for."""


@router.post("/completions", responses=streamed(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    state, model = _admit(body, request)
    params = body.sampling_params(state.default_sampling, client=CLIENT.get())
    request_id = _name(body, request, "cmpl")
    whole = body.truncate_prompt_tokens is not None
    state.check_queue(len(body.prompt), params.n, params.client)  # before texts are tokenized
    given = await encode(state, body.prompt, body.add_special_tokens, whole=whole)
    prompts = [truncate(state, body, ids) for ids in given]
    echoes = await beside(lambda: _echoes(state, body, given, prompts))
    fingerprint = state.fingerprint(body.kv_policy)
    own = {"max_tokens": body.token_limit_field}
    generation = Generation(state, prompts, params, request_id, request.headers, own)
    writer = CompletionWriter(body, fingerprint, request_id, model, len(prompts), echoes=echoes)
    return await _respond(generation, writer, body.stream, request)


@router.post("/chat/completions", responses=streamed(ChatCompletion))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    fingerprint = request.app.state.server.fingerprint(body.kv_policy)
    writer = partial(ChatWriter, body, fingerprint)
    return await _converse(body, request, "chatcmpl", writer)


@router.post("/responses", responses=streamed(ResponseBody))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, converted to a chat request. Nothing is stored: send all of it."""
    chat = await beside(body.as_chat)
    return await _converse(chat, request, "resp", partial(ResponseWriter, body))


@router.post("/responses/input_tokens", responses=answers(TokenCount))
async def count_input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """How many tokens the input has under the chat template."""
    count = await _count(await beside(body.as_chat), request)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


@anthropic.post("/messages", responses=streamed(Message))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, converted to a chat request."""
    reasons = request.app.state.server.chat.reasoning is not None
    chat = await beside(lambda: body.as_chat(reasons))
    writer = partial(MessageWriter, most=body.max_tokens)
    return await _converse(chat, request, "msg", writer, body.max_tokens)


@anthropic.post("/messages/count_tokens", responses=answers(TokenCount))
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """How many tokens a conversation has under the chat template."""
    chat = await beside(lambda: body.as_chat(False))
    return json_response({"input_tokens": await _count(chat, request)})


@router.get("/models", responses=answers(ModelList))
@router.get("/models/", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    state: ServerState = request.app.state.server
    state.check_ready()
    cards = [_card(state, name) for name in state.served_names]
    return json_response({"object": "list", "data": cards})


@router.get("/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, request: Request) -> Response:
    state: ServerState = request.app.state.server
    state.check_ready()
    return json_response(_card(state, state.check_model(name)))


# ---- steps ------------------------------------------------------------------------------------


def _admit(body: GenerationRequest, request: Request) -> tuple[ServerState, str]:
    """Refuse what can be refused without looking at the prompt; the model's name in the answer."""
    state: ServerState = request.app.state.server
    state.check_health()
    model = state.check_model(body.model)
    state.check_allowed(body.kv_policy)
    state.check_trace(body.kv_trace)
    return state, model


def _name(body: GenerationRequest, request: Request, prefix: str) -> str:
    """The request's id. ``request_id`` in the body replaces ``X-Request-Id``, in the answer too."""
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return f"{prefix}-{request.state.request_id}"


async def _converse(
    chat: ChatCompletionRequest,
    request: Request,
    prefix: str,
    writer: Callable[..., AnswerWriter],
    most: int | None = None,
) -> Response:
    """Answer a conversation, which may stand for another API's request: errors and what is skipped
    have its names. ``writer`` is made of the request's id, the model's name and the plan.

    ``most`` tokens are what an agent's own model would give: those that fit are what it gets.
    """
    own = chat.own_names
    counts = {"n": (chat.n or 1) > 1, "top_logprobs": bool(chat.top_logprobs)}
    for name, value in ({name: getattr(chat, name) for name in _UNSHOWN} | counts).items():
        if own and value is not None and value is not False:
            why = f"{name} goes with /v1/chat/completions"
            raise RequestError(why, param=name, code="unsupported_field")
    state, model = _admit(chat, request)
    request_id = _name(chat, request, prefix)
    try:
        plan = await plan_chat(state, chat)
    except RequestError as error:
        raise error.renamed(own) from None
    if most is not None and most <= state.engine.info.max_model_len - len(plan.prompt):
        plan = replace(plan, params=replace(plan.params, max_tokens=most))
    fields = {"max_tokens": chat.token_limit_field, "prompt": "messages"}
    names = {**own, **{theirs: own.get(name, name) for theirs, name in fields.items()}}
    made = writer(request_id, model, plan=plan)
    generation = Generation(state, [plan.prompt], plan.params, request_id, request.headers, names)
    skipped = [own.get(name, name) for name in chat.skipped]
    return await _respond(generation, made, chat.stream, request, skipped)


async def _count(chat: ChatCompletionRequest, request: Request) -> int:
    state: ServerState = request.app.state.server
    state.check_ready()
    state.check_model(chat.model)
    try:
        return len(await encode_chat(state, chat))
    except RequestError as error:
        raise error.renamed(chat.own_names) from None


async def _respond(
    generation: Generation,
    writer: AnswerWriter,
    stream: bool | None,
    request: Request,
    skipped: Sequence[str] = (),
) -> Response:
    """What ``writer`` makes of a generation, with a header that names what of the request this
    server does not do."""
    state: ServerState = request.app.state.server
    answer: Response
    if stream:
        answer = await stream_response(
            generation, writer, request.receive, state.settings.ping_interval
        )
    else:
        answer = await generation.finish(
            request.receive, lambda outputs: json_response(writer.whole(outputs))
        )
    if skipped:
        names = _NOT_IN_HEADERS.sub("?", ", ".join(skipped)[:_HEADER_MOST])
        answer.headers["X-Kvserve-Skipped"] = names
        log_once(f"requests ask for what this server does not do, and is skipped: {names}")
    return answer


def _echoes(
    state: ServerState,
    body: CompletionRequest,
    given: Sequence[list[int]],
    prompts: Sequence[list[int]],
) -> list[Echo] | None:
    """What ``echo`` puts before the completions: ``prompts``, which are all of what was ``given``,
    or a part."""
    if not body.echo:
        return None
    tokenizer, as_ids = state.require_tokenizer("echo"), bool(body.return_tokens_as_token_ids)
    texts = (
        text if isinstance(text, str) and len(ids) == len(whole) else decode(state, ids, "prompt")
        for text, whole, ids in zip(body.prompt, given, prompts, strict=True)
    )
    return [Echo(tokenizer, text, as_ids) for text in texts]


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "kvserve",
        "root": state.config.model.model,
        "parent": None,
        "max_model_len": state.engine.info.max_model_len,
        "permission": [],
    }
