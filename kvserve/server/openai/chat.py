"""Plans a chat request: its prompt, its sampling, and how its answers are parsed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvserve.log import RequestError
from kvserve.outputs import CompletionOutput, RequestOutput
from kvserve.sampling_params import SamplingParams, StructuredOutput
from kvserve.server.openai.chat_protocol import ChatCompletionRequest
from kvserve.server.openai.logprobs import TokenBytes
from kvserve.server.openai.prompts import decode, encode_chat
from kvserve.server.openai.structured import answer_or_calls, one_call, some_calls
from kvserve.server.openai.tool_choice import NamedTool
from kvserve.server.parsers.chat_format import DeltaParser
from kvserve.server.parsers.harmony import HarmonyParser, count_reasoning
from kvserve.server.parsers.message_parser import MessageParser, NamedCall, WithoutReasoning
from kvserve.server.parsers.reasoning import CLOSE, OPEN, ReasoningSplit
from kvserve.server.parsers.tool_formats import REQUIRED
from kvserve.server.parsers.tool_parsers import ToolSplit
from kvserve.server.state.beside import CLIENT, beside
from kvserve.server.state.server_state import ServerState

_PROMPT_END = 16
"""Last tokens of the prompt that show whether the template opens or closes the reasoning."""


@dataclass(frozen=True)
class ChatPlan:
    """``parser`` makes a parser for each choice."""

    prompt: list[int]
    params: SamplingParams
    parser: Callable[[], DeltaParser]
    count: Callable[[CompletionOutput], int]
    """Tokens of a choice that are reasoning."""
    token_bytes: TokenBytes

    def reasoning_tokens(self, output: RequestOutput) -> int:
        return sum(map(self.count, output.outputs))


async def plan_chat(state: ServerState, body: ChatCompletionRequest) -> ChatPlan:
    """Plan a chat request. Raises ``RequestError``, which names the field that cannot work."""
    prompt = await encode_chat(state, body)  # refuses templates that are not trusted
    _check_tools(state, body)
    form, reasoning = state.chat, state.chat.reasoning
    more: dict[str, Any] = {"thinking_token_budget": body.thinking_token_budget}
    inside = None
    if reasoning is not None:
        end = decode(state, prompt[-_PROMPT_END:], "messages")
        inside = reasoning.begins_inside(end)
        begun = body.messages[-1].content if body.continue_final_message else ""
        if begun.strip():
            inside = begun.rfind(OPEN) > begun.rfind(CLOSE)
        if inside is False:
            # The template has switched reasoning off: there is none to wait for or to limit.
            more["thinking_token_budget"] = None
        elif not reasoning.opens_by_itself(end) or reasoning.start_id is not None:
            more["thinking_end"] = reasoning.end_id
            more["thinking_start"] = reasoning.start_id if reasoning.opens_by_itself(end) else None
    if body.skip_special_tokens is None and form.skips_marks(body.calls_tools):
        more["skip_special_tokens"] = False
    more["structured_outputs"] = await beside(lambda: _structured(state, body))
    params = body.sampling_params(state.default_sampling, client=CLIENT.get(), **more)

    def parser() -> DeltaParser:
        made = _parser(state, body, inside)
        return WithoutReasoning(made) if body.include_reasoning is False else made

    def count(choice: CompletionOutput) -> int:
        if form.harmony:
            return count_reasoning(choice.token_ids, lambda ids: decode(state, ids, "messages"))
        marks = form.tools.opens if form.tools is not None and body.calls_tools else ()
        calls = [form.tokens[mark][0] for mark in marks if mark in form.tokens]
        return 0 if reasoning is None else reasoning.count_tokens(choice, inside, calls)

    return ChatPlan(prompt, params, parser, count, state.require_tokenizer("messages").token_bytes)


def _check_tools(state: ServerState, body: ChatCompletionRequest) -> None:
    """Refuse calls whose format is not known; those that a grammar forces have ours. Tools that the
    template does not write are skipped: the model sees none."""
    if not body.calls_tools or body.forces_calls or state.engine.tokenizer is None:
        return
    if not state.engine.tokenizer.forms(body.chat_template or state.chat_template).shows_tools:
        body.skipped.append("tools")
    elif not (state.chat.harmony or state.chat.tools is not None):
        raise RequestError(
            'tools with tool_choice "auto": it is not known how this model writes calls (its chat '
            "template does not show it in a form that is known); name the format with "
            '--tool-call-parser, or send tool_choice "required" or a named function',
            param="tools",
            code="unsupported_field",
        )


def _structured(state: ServerState, body: ChatCompletionRequest) -> StructuredOutput | None:
    """What the text must match: the answer's form, and that of calls."""
    form, answer, functions = state.chat, body.answer_form, body.functions
    parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, NamedTool):
        functions = [f for f in functions if f["name"] == body.tool_choice.name]
    if form.harmony and (body.forces_calls or answer is not None):
        functions = functions if body.calls_tools else []
        return answer_or_calls(form, answer, functions, must_call=body.forces_calls)
    if isinstance(body.tool_choice, NamedTool):
        return one_call(functions[0])
    if body.forces_calls:
        return some_calls(functions, parallel)
    if answer is None or not body.calls_tools:
        return answer
    return answer_or_calls(form, answer, functions, parallel=parallel)


def _parser(state: ServerState, body: ChatCompletionRequest, inside: bool | None) -> DeltaParser:
    form = state.chat
    tools = {function["name"]: function.get("parameters") or {} for function in body.functions}
    tools = tools if body.calls_tools else {}
    if form.harmony:
        return HarmonyParser(tools)
    split = None if form.reasoning is None else ReasoningSplit(inside)
    if not tools:
        return MessageParser(split, None)
    if isinstance(body.tool_choice, NamedTool):
        return MessageParser(split, NamedCall(body.tool_choice.name))
    parallel = body.parallel_tool_calls is not False
    syntax = REQUIRED if body.forces_calls or form.tools is None else form.tools
    begins = False if split is None else inside
    return MessageParser(split, ToolSplit(syntax, tools, parallel, begins))
