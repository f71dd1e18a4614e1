"""Plans a chat request: its prompt, its sampling, and how its answers are parsed."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.log import RequestError
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.server.openai.chat_protocol import ChatCompletionRequest, NamedTool
from kvserve.server.openai.prompts import encode_chat
from kvserve.server.parsers.message_parser import MessageParser, NamedCall
from kvserve.server.parsers.reasoning import ReasoningParser, ReasoningSplit
from kvserve.server.parsers.tool_parsers import PARSERS, REQUIRED, ToolSplit, ToolSyntax
from kvserve.server.state.server_state import ServerState

_PROMPT_END = 16
"""Last tokens of the prompt that show whether the template opens or closes the reasoning."""


@dataclass(frozen=True)
class ChatPlan:
    """``parser`` makes a parser for each choice, or ``None`` if the whole text is the content."""

    prompt: list[int]
    params: SamplingParams
    reasoning: ReasoningParser | None
    inside: bool | None
    tools: ToolSyntax | str | None
    """The format of calls, or the name of the one function that must be called."""
    parallel: bool

    def parser(self) -> MessageParser | None:
        if self.reasoning is None and self.tools is None:
            return None
        split = None if self.reasoning is None else ReasoningSplit(self.inside)
        if isinstance(self.tools, ToolSyntax):
            return MessageParser(split, ToolSplit(self.tools, self.parallel))
        return MessageParser(split, None if self.tools is None else NamedCall(self.tools))

    def reasoning_tokens(self, output: RequestOutput) -> int:
        if self.reasoning is None:
            return 0
        return sum(self.reasoning.count_tokens(choice, self.inside) for choice in output.outputs)


async def plan_chat(state: ServerState, body: ChatCompletionRequest) -> ChatPlan:
    """Plan a chat request. Raises ``RequestError``, which names the field that cannot work."""
    tools = _tools(state, body)
    prompt = await encode_chat(state, body)
    reasoning, inside = state.reasoning, None
    if reasoning is not None:
        end = state.require_tokenizer("messages").decode(
            prompt[-_PROMPT_END:], skip_special_tokens=False
        )
        inside = reasoning.begins_inside(end)
    # If the template has switched reasoning off, there is none to wait for or to limit.
    off = inside is False
    params = body.sampling_params(
        state.default_sampling,
        thinking_end=None if reasoning is None or off else reasoning.end_id,
        thinking_token_budget=None if off else body.thinking_token_budget,
        **_keep_marks(body, tools),
    )
    parallel = body.parallel_tool_calls is not False
    return ChatPlan(prompt, params, reasoning, inside, tools, parallel)


def _tools(state: ServerState, body: ChatCompletionRequest) -> ToolSyntax | str | None:
    if not body.calls_tools:
        return None
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    if body.tool_choice == "required":
        return REQUIRED
    options = state.options
    if options.tool_parser is None or not options.auto_tools:
        raise RequestError(
            'tools with tool_choice "auto" need a server with --enable-auto-tool-choice and '
            '--tool-call-parser; "required" and a named function work without these flags',
            param="tools",
            code="unsupported_field",
        )
    return PARSERS[options.tool_parser]


def _keep_marks(body: ChatCompletionRequest, tools: ToolSyntax | str | None) -> dict[str, bool]:
    """Keep special tokens in the text if they mark the calls."""
    if isinstance(tools, ToolSyntax) and tools.special and body.skip_special_tokens is None:
        return {"skip_special_tokens": False}
    return {}
