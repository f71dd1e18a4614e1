"""The OpenAI-compatible routes: completions, chat completions, responses and models."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvserve.log import RequestError
from kvserve.outputs import RequestOutput
from kvserve.server.anthropic.answer import MessageWriter
from kvserve.server.anthropic.request import MessagesRequest
from kvserve.server.http.json_body import JsonRoute
from kvserve.server.http.schemas import (
    ChatCompletion,
    Completion,
    ModelCard,
    ModelList,
    ResponseBody,
    answers,
    streamed,
)
from kvserve.server.openai.chat import ChatPlan, plan_chat
from kvserve.server.openai.chat_protocol import ChatCompletionRequest
from kvserve.server.openai.logprobs import Echo, chat_logprobs, leave_prompt_only, prompt_logprobs
from kvserve.server.openai.prompts import decode, encode, truncate
from kvserve.server.openai.protocol import CompletionRequest, GenerationRequest, log_once
from kvserve.server.openai.response_items import ResponseWriter, response_head
from kvserve.server.openai.responses import (
    Json,
    chat_choice,
    chat_completion,
    completion,
    completion_choice,
    json_response,
    model_card,
)
from kvserve.server.openai.responses_protocol import OWN_NAMES, ResponsesRequest
from kvserve.server.openai.streaming import ChatChunks, CompletionChunks, stream_response
from kvserve.server.parsers.message_parser import read_message
from kvserve.server.state.beside import CLIENT, beside
from kvserve.server.state.generation import Generation
from kvserve.server.state.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["OpenAI"], route_class=JsonRoute)

_HEADER_MOST = 1000
_NOT_IN_HEADERS = re.compile(r"[^\x20-\x7e]")
_Answer = TypeVar("_Answer", bound=Response)


@router.post("/completions", responses=streamed(Completion))
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue one prompt or several."""
    state, model = admit(body, request)
    params = body.sampling_params(state.default_sampling, client=CLIENT.get())
    request_id = name_request(body, request, "cmpl")
    whole = body.truncate_prompt_tokens is not None
    state.check_queue(len(body.prompt) * params.n, params.client)  # before many texts are tokenized
    prompts = await encode(state, body.prompt, body.add_special_tokens, whole=whole)
    prompts = [truncate(state, body, ids) for ids in prompts]
    echoes = await beside(lambda: _echoes(state, body, prompts))
    fingerprint = state.fingerprint(body.kv_policy)
    generation = Generation(
        state, prompts, params, request_id, request.headers, body.token_limit_field
    )
    if body.stream:
        tokenizer = state.engine.tokenizer
        about = request_id, model, len(prompts), fingerprint
        chunks = CompletionChunks(body, *about, echoes=echoes, tokenizer=tokenizer)
        return await stream_response(
            generation, chunks, request.receive, state.settings.ping_interval
        )
    head = _head(request_id, model, fingerprint)

    def answer(outputs: list[RequestOutput]) -> Response:
        choices = []
        for i, output in enumerate(outputs):
            echo = echoes[i] if echoes else None
            if body.scores_only:
                leave_prompt_only(output)
            if echo is not None:
                echo.encode(output, params.logprobs or 0, state.require_tokenizer("echo"))
            choices += _completion_choices(body, i * params.n, params.logprobs or 0, echo, output)
        return json_response(completion(head, outputs, choices))

    return await generation.finish(request.receive, answer)


@router.post("/chat/completions", responses=streamed(ChatCompletion))
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation."""
    state, model = admit(body, request)
    request_id = name_request(body, request, "chatcmpl")
    plan = await plan_chat(state, body)
    fingerprint = state.fingerprint(body.kv_policy)
    generation = Generation(
        state, [plan.prompt], plan.params, request_id, request.headers, body.token_limit_field
    )
    if body.stream:
        chunks = ChatChunks(body, request_id, model, 1, fingerprint, plan=plan)
        return await stream_response(
            generation, chunks, request.receive, state.settings.ping_interval
        )
    head = _head(request_id, model, fingerprint)
    return await generation.finish(
        request.receive, lambda outputs: _chat_answer(body, plan, head, outputs[0])
    )


@router.post("/responses", responses=streamed(ResponseBody))
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, converted to a chat request. Nothing is stored: send all of it."""
    chat = await beside(body.as_chat)
    if (chat.n or 1) > 1:
        raise RequestError("n must be 1", param="n")
    if chat.kv_trace:
        raise RequestError(
            "kv_trace goes with /v1/chat/completions and /v1/completions",
            param="kv_trace",
            code="unsupported_field",
        )
    state, model = admit(chat, request)
    request_id = name_request(chat, request, "resp")
    try:
        plan = await plan_chat(state, chat)
    except RequestError as error:
        raise error.renamed(OWN_NAMES) from None
    generation = Generation(
        state, [plan.prompt], plan.params, request_id, request.headers, body.token_limit_field
    )
    head = response_head(body, request_id, int(time.time()), model)
    writer = ResponseWriter(head, plan)
    return await respond(generation, writer, body, request)


@router.get("/models", responses=answers(ModelList))
@router.get("/models/", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """The names this server answers to."""
    state: ServerState = request.app.state.server
    state.check_ready()
    return json_response(
        {"object": "list", "data": [_card(state, name) for name in state.served_names]}
    )


@router.get("/models/{name:path}", responses=answers(ModelCard))
async def get_model(name: str, request: Request) -> Response:
    state: ServerState = request.app.state.server
    state.check_ready()
    return json_response(_card(state, state.check_model(name)))


# ---- steps ------------------------------------------------------------------------------------


def admit(body: GenerationRequest, request: Request) -> tuple[ServerState, str]:
    """Refuse what can be refused without looking at the prompt."""
    state: ServerState = request.app.state.server
    state.check_health()
    model = state.check_model(body.model)
    state.check_allowed(body.kv_policy)
    state.check_trace(body.kv_trace)
    return state, model


def say_skipped(skipped: Sequence[str], answer: _Answer) -> _Answer:
    """The answer, with a header that names what of the request this server does not do."""
    if skipped:
        names = _NOT_IN_HEADERS.sub("?", ", ".join(skipped)[:_HEADER_MOST])
        answer.headers["X-Kvserve-Skipped"] = names
        log_once(f"requests ask for what this server does not do, and is skipped: {names}")
    return answer


async def respond(
    generation: Generation,
    writer: MessageWriter | ResponseWriter,
    body: MessagesRequest | ResponsesRequest,
    request: Request,
) -> Response:
    """What ``writer`` makes of a generation: a stream if the request asks for one."""
    state: ServerState = request.app.state.server
    if body.stream:
        stream = await stream_response(
            generation, writer, request.receive, state.settings.ping_interval
        )
        return say_skipped(body.skipped(), stream)

    def answer(outputs: list[RequestOutput]) -> Response:
        writer.advance(outputs[0])
        return say_skipped(body.skipped(), json_response(writer.body(outputs[0])))

    return await generation.finish(request.receive, answer)


def name_request(body: GenerationRequest, request: Request, prefix: str) -> str:
    """The request's id. ``request_id`` in the body replaces ``X-Request-Id``, in the answer too."""
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return f"{prefix}-{request.state.request_id}"


def _echoes(
    state: ServerState, body: CompletionRequest, prompts: Sequence[list[int]]
) -> list[Echo] | None:
    """What ``echo`` puts before the completions."""
    if not body.echo:
        return None
    tokenizer = state.require_tokenizer("echo")
    echoes = []
    for given, ids in zip(body.prompt, prompts, strict=True):
        text = given if isinstance(given, str) else decode(state, ids, "prompt")
        first = "" if body.logprobs is None else tokenizer.token_text(ids[0])
        echoes.append(Echo(text, first, as_ids=bool(body.return_tokens_as_token_ids)))
    return echoes


def _completion_choices(
    body: CompletionRequest, first: int, top: int, echo: Echo | None, output: RequestOutput
) -> list[Json]:
    """The choices of one prompt, numbered from ``first`` on."""
    choices = []
    scored = prompt_logprobs(output) if body.prompt_logprobs is not None else None
    for choice in output.outputs:
        as_ids = bool(body.return_tokens_as_token_ids)
        part = completion_choice(first + choice.index, choice, top, echo, as_ids)
        if body.return_token_ids:
            part["token_ids"] = choice.token_ids
            part["prompt_token_ids"] = output.prompt_token_ids
        if body.prompt_logprobs is not None:
            part["prompt_logprobs"] = scored
        if body.kv_trace:
            part["kv_trace"] = choice.kv_trace
        choices.append(part)
    return choices


def _chat_answer(
    body: ChatCompletionRequest, plan: ChatPlan, head: Json, output: RequestOutput
) -> Response:
    choices = []
    for choice in output.outputs:
        message, reason = read_message(choice, plan.parser())
        top, as_ids = plan.params.logprobs or 0, bool(body.return_tokens_as_token_ids)
        logprobs = chat_logprobs(choice, top, plan.token_bytes, as_ids=as_ids)
        part = chat_choice(choice, logprobs, message, reason)
        if body.return_token_ids:
            part["token_ids"] = choice.token_ids
        if body.kv_trace:
            part["kv_trace"] = choice.kv_trace
        choices.append(part)
    answer = chat_completion(head, output, choices, plan.reasoning_tokens(output))
    if body.return_token_ids:
        answer["prompt_token_ids"] = output.prompt_token_ids
    if body.prompt_logprobs is not None:
        answer["prompt_logprobs"] = prompt_logprobs(output)
    return json_response(answer)


def _head(request_id: str, model: str, fingerprint: str) -> Json:
    return {
        "id": request_id,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def _card(state: ServerState, name: str) -> dict[str, Any]:
    return model_card(
        name, state.config.model.model, state.started, state.engine.info.max_model_len
    )
