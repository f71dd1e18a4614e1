"""Turns ``POST /v1/responses`` into a chat request.

Nothing is stored, so a request carries the whole history.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from kvserve import absent
from kvserve.log import RequestError
from kvserve.sampling_params import refused
from kvserve.server.openai.chat_protocol import ChatCompletionRequest, parse_chat
from kvserve.server.openai.fields import UNSEEN, FirstFault

_LOGPROBS = "message.output_text.logprobs"
IGNORED = ("max_tool_calls", "truncation")
"""They are about stored answers or OpenAI's own tools, or what is done when the context is too
short: here that is an error."""

OWN_NAMES: dict[Any, str] = {
    "messages": "input",
    "response_format": "text",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning",
}
"""Fields of a chat request -> their names here."""
_TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Parts of a message -> where their text is."""
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_NOT_SEEN = ("input_image", "input_file", "input_audio", "input_video")
_SKIPPED_ITEMS = frozenset(
    (
        *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
        *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
        *("mcp_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("tool_search_call", "tool_search_output", "compaction"),
    )
)
"""What OpenAI's own tools and its storage leave in a history."""


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
    """A function. Tools of other types, as OpenAI runs or knows them, are skipped."""

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


class ResponsesRequest(BaseModel):
    """Further fields (``kv_policy``, ``top_k``, ``seed``, ...) are those of chat completions."""

    model_config = ConfigDict(extra="allow")
    further_fields: ClassVar = (
        *ChatCompletionRequest.model_fields,
        *ChatCompletionRequest.further_fields,
        *IGNORED,
    )

    model: str | None = None
    input: Input
    instructions: str | None = None
    tools: Annotated[list[ResponseTool], FirstFault()] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    reasoning: ReasoningSettings | None = None
    text: TextSettings | None = None
    include: Annotated[list[Any], FirstFault()] | None = None
    stream: bool | None = None

    def as_chat(self) -> tuple[ChatCompletionRequest, list[str]]:
        """The equivalent chat request, whose errors name the fields of this one; and what it leaves
        out: tools that this server does not have, and what is left of them in the history."""
        extra = dict(self.model_extra or {})
        logprobs = _LOGPROBS in (self.include or ())
        for name, asked in {"top_logprobs": extra.get("top_logprobs"), "include": logprobs}.items():
            if asked:
                why = "log-probabilities go with /v1/chat/completions"
                raise refused(absent.refusal(name, why), name)
        extra = {name: value for name, value in extra.items() if name not in IGNORED}
        tools, skipped = list[dict[str, Any]](), list[str]()
        for i, tool in enumerate(self.tools or ()):
            if tool.type == "function":
                function = tool.model_dump(exclude_none=True, exclude={"type"})
                tools.append({"type": "function", "function": function})
            else:
                skipped.append(f"tools[{i}] ({tool.type})")
        choice: Any = self.tool_choice
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        form = self.text.format if self.text is not None else None
        if form is not None and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        given = {
            **extra,
            "model": self.model,
            "messages": self._messages(skipped),
            "tools": tools or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": form,
            "stream": self.stream,
        }
        return parse_chat(given, OWN_NAMES), skipped

    @property
    def token_limit_field(self) -> str:
        return "max_tokens" if self.max_output_tokens is None else "max_output_tokens"

    def _messages(self, skipped: list[str]) -> list[dict[str, Any]]:
        """The messages; what is left out of the history is added to ``skipped``."""
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
                thought = _thought(item.get("content"))
            elif kind == "function_call":
                _append_call(messages, item, item.get("arguments", ""))
            elif kind == "custom_tool_call":
                _append_call(messages, item, {"input": item.get("input")})
            elif kind in _OUTPUTS:
                output = _content(item, i, "output", skipped)
                call_id = item.get("call_id")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            elif kind == "message":
                messages.append({"role": item.get("role"), "content": _content(item, i)})
            elif isinstance(kind, str) and kind in _SKIPPED_ITEMS:
                skipped.append(f"input[{i}] ({kind})")
            else:
                raise RequestError(
                    f"input[{i}]: items of type {kind!r} are not supported", param="input"
                )
            if thought and messages and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning"], thought = thought, None
        return messages


def _append_call(messages: list[dict[str, Any]], item: dict[str, Any], arguments: Any) -> None:
    """Add a call. Calls in a row belong to one message of the assistant."""
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": arguments},
    }
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": None})
    messages[-1].setdefault("tool_calls", []).append(call)


def _thought(content: Any) -> str:
    """The text of a reasoning item, whatever its parts are called."""
    parts = content if isinstance(content, list) else ()
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def _content(
    item: dict[str, Any], index: int, name: str = "content", skipped: list[str] | None = None
) -> Any:
    """A text, or its parts. What a tool has shown is ``skipped``, where that is given."""
    content = item.get(name)
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if skipped is not None and kind in _NOT_SEEN:
            skipped.append(f"input[{index}] ({kind})")
            # To refuse what a tool has shown would end the conversation: the agent sends it again.
            texts.append(UNSEEN)
            continue
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise RequestError(
                f"input[{index}].{name}: parts of type {kind!r} are not supported; only text is",
                param="input",
            )
        texts.append(part.get(_TEXT_PARTS[kind]))
    return [{"type": "text", "text": text} for text in texts]
