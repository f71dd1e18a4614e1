"""What clients may send to the chat routes: messages, tools, and the request around them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvserve.log import RequestError
from kvserve.sampling_params import MAX_LOGPROBS, StructuredOutput
from kvserve.server.openai.fields import Content, FirstFault
from kvserve.server.openai.protocol import GenerationRequest
from kvserve.server.openai.structured import one_call, some_calls


class FunctionCall(BaseModel):
    name: str
    arguments: str = ""


class ToolCall(BaseModel):
    """A call that an earlier answer made."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(BaseModel):
    """``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    """A ``tool_choice`` that names one function."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatMessage(BaseModel):
    """One message. Further keys (``name``, ``tool_call_id``, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FirstFault()] | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as templates expect it: ``system`` for ``developer``, arguments as objects,
        and the reasoning under both names.
        """
        message = self.model_dump(exclude_none=True)
        if self.role == "developer":
            message["role"] = "system"
        thought = self.reasoning_content or self.reasoning
        if thought:
            message |= {"reasoning": thought, "reasoning_content": thought}
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = _object(call["function"]["arguments"])
        return message


def _object(arguments: str) -> Any:
    """Arguments as an object: templates write the JSON. A text that is not JSON stays a text."""
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return arguments


class ChatPrompt(BaseModel):
    """The part of a chat request that becomes the prompt; ``/tokenize`` takes it too."""

    messages: Annotated[list[ChatMessage], FirstFault()]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: Annotated[list[Tool], FirstFault()] | None = None

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()] or None

    @model_validator(mode="after")
    def _check_messages(self) -> ChatPrompt:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_prompt")
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        return self


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """``POST /v1/chat/completions``."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_tools(self) -> ChatCompletionRequest:
        names = [tool.function.name for tool in self.tools or ()]
        choice = self.tool_choice
        if choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice: there is no tool {choice.function.name!r}", param="tool_choice"
            )
        if self.forced_calls() is not None and super().structured_output() is not None:
            raise RequestError(
                "tool_choice does not go with structured output", param="tool_choice"
            )
        return self

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return super().tools_for_template() if self.calls_tools else None

    def forced_calls(self) -> StructuredOutput | None:
        """The structured output that a ``tool_choice`` of ``required`` or a function forces."""
        functions = [tool.function.model_dump(exclude_none=True) for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            wanted = self.tool_choice.function.name
            return one_call(next(f for f in functions if f["name"] == wanted))
        if self.tool_choice == "required":
            return some_calls(functions, self.parallel_tool_calls is not False)
        return None

    def structured_output(self) -> StructuredOutput | None:
        return self.forced_calls() or super().structured_output()

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeChatRequest(ChatPrompt):
    """``POST /tokenize`` of messages."""

    model: str | None = None
    return_token_strs: bool | None = None
