"""Anthropic's routes: messages, and how many tokens they have."""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvserve.log import RequestError
from kvserve.server.anthropic.answer import MessageWriter
from kvserve.server.anthropic.request import OWN_NAMES, MessagesRequest
from kvserve.server.http.json_body import JsonRoute
from kvserve.server.http.openai_routes import admit, name_request, respond
from kvserve.server.http.schemas import Message, TokenCount, answers, streamed
from kvserve.server.openai.chat import plan_chat
from kvserve.server.openai.prompts import encode_chat
from kvserve.server.openai.responses import json_response
from kvserve.server.state.beside import beside
from kvserve.server.state.generation import Generation
from kvserve.server.state.server_state import ServerState

router = APIRouter(prefix="/v1", tags=["Anthropic"], route_class=JsonRoute)


@router.post("/messages", responses=streamed(Message))
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation, converted to a chat request."""
    state: ServerState = request.app.state.server
    chat = await beside(lambda: body.as_chat(state.chat.reasoning is not None))
    if (chat.n or 1) > 1 or chat.kv_trace:
        name = "kv_trace" if chat.kv_trace else "n"
        raise RequestError(f"{name} goes with /v1/chat/completions", param=name)
    state, model = admit(chat, request)
    request_id = name_request(chat, request, "msg")
    try:
        plan = await plan_chat(state, chat)
    except RequestError as error:
        raise error.renamed(OWN_NAMES) from None
    # Agents ask for as many tokens as their own models give: those that fit are what they get.
    room = state.engine.info.max_model_len - len(plan.prompt)
    if body.max_tokens is not None and body.max_tokens <= room:
        plan = replace(plan, params=replace(plan.params, max_tokens=body.max_tokens))
    generation = Generation(state, [plan.prompt], plan.params, request_id, request.headers)
    writer = MessageWriter(request_id, model, plan, body.max_tokens)
    return await respond(generation, writer, body, request)


@router.post("/messages/count_tokens", responses=answers(TokenCount))
async def count_tokens(body: MessagesRequest, request: Request) -> Response:
    """How many tokens a conversation has under the chat template."""
    state: ServerState = request.app.state.server
    state.check_ready()
    chat = await beside(lambda: body.as_chat(False))
    state.check_model(chat.model)
    try:
        ids = await encode_chat(state, chat)
    except RequestError as error:
        raise error.renamed(OWN_NAMES) from None
    return json_response({"input_tokens": len(ids)})
