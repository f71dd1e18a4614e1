"""What clients may send to the chat routes: messages, tools, and the request around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from kvserve.engine.frontend.content import HistoryReader
from kvserve.log import RequestError, shown
from kvserve.sampling_params import MAX_LOGPROBS
from kvserve.server.openai.fields import Content, FirstFault
from kvserve.server.openai.protocol import GenerationRequest, parse
from kvserve.server.openai.structured import GUIDED
from kvserve.server.openai.tool_choice import AllowedTools, NamedTool, ToolChoice

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _fields_of(model: BaseModel, **changes: Any) -> dict[str, Any]:
    """What was given of a model's fields, and further ones, with ``changes``."""
    fields = {**model.__dict__, **(model.model_extra or {}), **changes}
    return {name: value for name, value in fields.items() if value is not None}


class FunctionCall(BaseModel):
    """``arguments`` are JSON text; some clients send the object itself."""

    name: str
    arguments: str | dict[str, Any] | None = ""


class ToolCall(BaseModel):
    """A call that an earlier answer made, maybe another server's: of a freeform tool it is one with
    the argument ``input``."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    @model_validator(mode="before")
    @classmethod
    def _of_freeform(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {name: each for name, each in value.items() if each is not None}
        own = given.pop("custom", None)
        if isinstance(own, dict):
            function = {"name": own.get("name"), "arguments": {"input": own.get("input")}}
            given |= {"type": "function", "function": function}
        return given


class Function(BaseModel):
    """``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Function:
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise RequestError(
                f"parameters must be a schema of an object, since arguments have names; its type "
                f"is {shown(kind)}",
                param="parameters",
            )
        return self

    def fields(self) -> dict[str, Any]:
        return _fields_of(self)


class Tool(BaseModel):
    """A function; tools of other types are skipped."""

    type: str
    function: Function | None = None

    @model_validator(mode="after")
    def _check_function(self) -> Tool:
        if self.type == "function" and self.function is None:
            raise RequestError("function is required", param="function", code="missing_field")
        return self


class ChatMessage(BaseModel):
    """One message. Further keys (``name``, ``tool_call_id``, ...) go to the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = ""
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FirstFault()] | None = None

    def fields(self) -> dict[str, Any]:
        """What was given; the chat template gets it in the form that it wants."""
        if self.tool_calls is None:
            return _fields_of(self)
        calls = [
            _fields_of(call, function=dict(call.function.__dict__)) for call in self.tool_calls
        ]
        return _fields_of(self, tool_calls=calls)


class ChatPrompt(BaseModel):
    """The part of a chat request that becomes the prompt; ``/tokenize`` takes it too."""

    messages: Annotated[list[ChatMessage], FirstFault()]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    tools: Annotated[list[Tool], FirstFault()] | None = None
    _skipped: list[str] = PrivateAttr(default_factory=list)
    _thinks: bool | None = PrivateAttr(default=None)
    _own_names: Mapping[Any, str] = PrivateAttr(default_factory=dict)

    @property
    def skipped(self) -> list[str]:
        """What of the request is not done here, or does not show; it grows until the answer."""
        return self._skipped

    @property
    def thinks(self) -> bool | None:
        """Whether another API's request turns the reasoning on or off."""
        return self._thinks

    @property
    def own_names(self) -> Mapping[Any, str]:
        """What its fields are called in another API's request that it stands for."""
        return self._own_names

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        return [tool.function.fields() for tool in self.tools or () if tool.function is not None]

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return [{"type": "function", "function": function} for function in self.functions] or None

    @model_validator(mode="after")
    def _read(self) -> ChatPrompt:
        if not self.messages:
            raise RequestError("messages must not be empty", param="messages", code="empty_prompt")
        roles = {message.role for message in self.messages}
        history = HistoryReader("messages", bool(roles & {"assistant", "tool", "function"}))
        for at, message in enumerate(self.messages):
            read = history.read(message.content, at, message.role, f"messages[{at}].content")
            message.content = "\n".join(read.texts)
            if read.thought and not (message.reasoning or message.reasoning_content):
                message.reasoning = read.thought
        self._skipped += history.skipped
        for at, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                self._skipped.append(f"tools[{at}] ({tool.type})")
        self.tools = [tool for tool in self.tools or () if tool.type == "function"] or None
        return self


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    """``POST /v1/chat/completions``."""

    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    thinking_token_budget: int | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        self._choose_tools()
        guided = [
            name for name in ("structured_outputs", *GUIDED) if getattr(self, name) is not None
        ]
        if self.forces_calls and guided:
            raise RequestError(f"tool_choice does not go with {guided[0]}", param="tool_choice")
        return self

    def _choose_tools(self) -> None:
        """Read ``tool_choice``; of ``allowed_tools`` only those are left."""
        names = [function["name"] for function in self.functions]
        choice = self.tool_choice
        asked = choice.names if isinstance(choice, AllowedTools) else ()
        asked = (choice.name,) if isinstance(choice, NamedTool) else asked
        if choice not in (None, "none", "auto") and not names:
            raise RequestError("tool_choice needs tools", param="tool_choice")
        for name in asked:
            if name not in names:
                raise RequestError(f"tool_choice: there is no tool {name!r}", param="tool_choice")
        if isinstance(choice, AllowedTools):
            kept = [
                tool for tool in self.tools or () if tool.function and tool.function.name in asked
            ]
            if choice.mode == "required" and not kept:
                raise RequestError("tool_choice needs tools", param="tool_choice")
            self.tools, self.tool_choice = kept or None, choice.mode
            self.__dict__.pop("functions", None)

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"

    def tools_for_template(self) -> list[dict[str, Any]] | None:
        return super().tools_for_template() if self.calls_tools else None

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class StandsForChat(BaseModel):
    """Another API's request, which is answered as a chat request."""

    model_config = ConfigDict(extra="allow")
    further_fields: ClassVar[tuple[str, ...]] = (
        *ChatCompletionRequest.model_fields,
        *ChatCompletionRequest.further_fields,
    )
    own_names: ClassVar[Mapping[Any, str]]
    """Fields of a chat request -> their names here."""
    left_out: ClassVar[tuple[str, ...]]
    """Further fields that are none of a chat request."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None

    def chat_of(
        self, given: dict[str, Any], skipped: Sequence[str], thinks: bool | None = None
    ) -> ChatCompletionRequest:
        """The chat request with ``given`` fields; those that are ``None`` are left out, ``skipped``
        is what was besides. Errors name the fields of this one."""
        extra = {k: v for k, v in (self.model_extra or {}).items() if k not in self.left_out}
        same = {name: getattr(self, name) for name in StandsForChat.model_fields}
        fields = {k: v for k, v in {**extra, **same, **given}.items() if v is not None}
        try:
            made = parse(ChatCompletionRequest, fields)
        except RequestValidationError as exc:
            raise RequestValidationError([self._renamed(each) for each in exc.errors()]) from None
        made._skipped[:0] = skipped
        made._thinks, made._own_names = thinks, self.own_names
        return made

    def _renamed(self, error: dict[str, Any]) -> dict[str, Any]:
        """An error of the chat request: the functions of its tools and calls are those themselves
        here."""
        own, (body, *path) = self.own_names, error["loc"]
        path = [own.get(part, part) for part in path if part != "function"]
        cause = error.get("ctx", {}).get("error")
        if isinstance(cause, RequestError):
            error = {**error, "ctx": {"error": cause.renamed(own)}}
        return {**error, "loc": (body, *path)}


class TokenizeChatRequest(ChatPrompt):
    """``POST /tokenize`` of messages."""

    model: str | None = None
    return_token_strs: bool | None = None
