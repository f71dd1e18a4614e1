"""Turns ``POST /v1/responses`` into a chat request.

Nothing is stored, so a request carries the whole history.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from kvserve import absent
from kvserve.engine.frontend.content import HistoryReader, thought_text
from kvserve.log import RequestError
from kvserve.sampling_params import refused
from kvserve.server.openai.chat_protocol import ChatCompletionRequest, StandsForChat
from kvserve.server.openai.client_tools import BRINGS_TOOLS, CALLS, INPUT, ClientTools, loaded
from kvserve.server.openai.fields import FirstFault

_LOGPROBS = "message.output_text.logprobs"
IGNORED = ("max_tool_calls", "truncation")
"""They are about stored answers or OpenAI's own tools, or what is done when the context is too
short: here that is an error."""

_CALLS = tuple(CALLS.values())
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "tool_search_output")


def _parse_input(value: Any) -> str | list[dict[str, Any]]:
    items = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if items or isinstance(value, str):
        return value
    raise RequestError("input must be a string or a list of items")


Input = Annotated[
    str | list[dict[str, Any]],
    PlainValidator(_parse_input, json_schema_input_type=str | list[dict[str, Any]]),
]


class ResponseTool(BaseModel):
    """A tool of the client (``ClientTools``), or one that OpenAI runs, which is skipped."""

    model_config = ConfigDict(extra="allow")

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ReasoningSettings(BaseModel):
    """A ``summary`` is ignored: the output has the reasoning itself."""

    effort: str | None = None


class TextSettings(BaseModel):
    format: dict[str, Any] | None = None


class ResponsesRequest(StandsForChat):
    """Further fields (``kv_policy``, ``top_k``, ``seed``, ...) are those of chat completions."""

    further_fields = (*StandsForChat.further_fields, *IGNORED)
    left_out = IGNORED
    own_names: ClassVar = {
        "messages": "input",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning",
    }

    input: Input
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], FirstFault()] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    include: Annotated[list[Any], FirstFault()] | None = None

    @cached_property
    def client_tools(self) -> ClientTools:
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
        return ClientTools.of(tools, self._items)

    @property
    def _items(self) -> list[dict[str, Any]]:
        return [] if isinstance(self.input, str) else self.input

    def as_chat(self) -> ChatCompletionRequest:
        """The equivalent chat request, whose errors name the fields of this one."""
        extra, listed = self.model_extra or {}, _LOGPROBS in (self.include or ())
        for name, asked in {"top_logprobs": extra.get("top_logprobs"), "include": listed}.items():
            if asked:
                why = "log-probabilities go with /v1/chat/completions"
                raise refused(absent.refusal(name, why), name)
        tools = self.client_tools
        answered = any(each.get("role") == "assistant" or _called(each) for each in self._items)
        history = HistoryReader("input", answered)
        form = self.text.format if self.text is not None else None
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        given = {
            "messages": self._messages(history),
            "tools": tools.functions or None,
            "tool_choice": tools.choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": form,
        }
        return self.chat_of(given, [*tools.skipped, *history.skipped])

    def _messages(self, history: HistoryReader) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        if not self.input:
            raise RequestError("input must not be empty", param="input", code="empty_prompt")
        thought = None
        for i, item in enumerate(self.input):
            kind = item.get("type", "message")
            if kind == "reasoning":
                thought = thought_text(item)
            elif kind in _CALLS:
                function = {"name": self.client_tools.name_of(item), "arguments": _arguments(item)}
                _append_call(messages, item, function)
            elif kind in _OUTPUTS:
                output = item.get("output", _told(item))
                text = "\n".join(history.read(output, i, "tool", "input").texts)
                call_id = item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
            elif kind == "message" or (kind == "agent_message" and item.get("content")):
                role = item.get("role") if kind == "message" else "user"
                read = history.read(item.get("content"), i, str(role), "input")
                messages.append({"role": role, "content": "\n".join(read.texts)})
                thought = thought or read.thought
            elif isinstance(kind, str) and kind != "item_reference":
                if kind not in BRINGS_TOOLS:
                    history.skip(i, kind)
            else:
                raise RequestError(
                    f"input[{i}]: items of type {kind!r} are not supported: nothing is stored "
                    "here; send the items themselves, as clients do with store=false",
                    param="input",
                )
            if thought and messages and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning"], thought = thought, None
        return messages


def _called(item: dict[str, Any]) -> bool:
    return item.get("type") in (*_CALLS, *_OUTPUTS)


def _told(item: dict[str, Any]) -> str | None:
    """What the model is told of a search for tools."""
    names = ", ".join(str(tool.get("name")) for tool in loaded(item))
    return f"Loaded: {names or 'none'}" if item.get("type") == "tool_search_output" else None


def _arguments(item: dict[str, Any]) -> Any:
    freeform = item["type"] == "custom_tool_call"
    return {INPUT: item.get("input")} if freeform else item.get("arguments", "")


def _append_call(
    messages: list[dict[str, Any]], item: dict[str, Any], function: dict[str, Any]
) -> None:
    """Add a call. Calls in a row belong to one message of the assistant."""
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    call = {"id": item.get("call_id"), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)
