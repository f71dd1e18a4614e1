"""Turns ``POST /v1/messages`` into a chat request. Nothing is stored, as there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from kvserve.engine.frontend.content import HistoryReader
from kvserve.log import RequestError
from kvserve.server.openai.chat_protocol import ChatCompletionRequest, Effort, StandsForChat
from kvserve.server.openai.fields import FirstFault, Strings

_SKIPPED = ("mcp_servers", "container", "context_management")
"""Fields that ask for what this server does not do."""
_BILLING = "x-anthropic-billing-header:"
"""Begins a part of Claude Code's system prompt that is for Anthropic's accounts. It differs in each
request, and no prefix would be found again."""

Blocks = Annotated[list[dict[str, Any]], FirstFault()]


class MessageParam(BaseModel):
    """One message; ``content`` is a text or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessagesTool(BaseModel):
    """A tool of the client. Those that Anthropic defines have another type, and no schema."""

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    name: str = ""
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(BaseModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def of_chat(self) -> Any:
        """What chat has for it; there any is called so too."""
        return {"type": "function", "name": self.name or ""} if self.type == "tool" else self.type


class Thinking(BaseModel):
    """Where it is neither on nor off, the template decides."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=1)


class OutputConfig(BaseModel):
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(StandsForChat):
    """Further fields (``kv_policy``, ``seed``, ...) are those of chat completions."""

    further_fields = (*StandsForChat.further_fields, *_SKIPPED)
    left_out = _SKIPPED
    own_names: ClassVar = {
        "max_completion_tokens": "max_tokens",
        "stop": "stop_sequences",
        "response_format": "output_config.format",
        "parameters": "input_schema",
        "reasoning_effort": "output_config",
        "thinking_token_budget": "thinking",
    }

    messages: Annotated[list[MessageParam], FirstFault()]
    max_tokens: int | None = Field(default=None, ge=1)
    system: str | Blocks | None = None
    tools: Annotated[list[MessagesTool], FirstFault()] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: Strings | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: int | None = None

    def as_chat(self, limits_thinking: bool) -> ChatCompletionRequest:
        """The equivalent chat request, whose errors name the fields of this one.

        ``limits_thinking``: it is known where this model's reasoning ends. The client's token limit
        is left out: here it may exceed the context.
        """
        extra = self.model_extra or {}
        choice, thinking, config = self.tool_choice, self.thinking, self.output_config
        tools, skipped = list[dict[str, Any]](), list[str]()
        for i, tool in enumerate(self.tools or ()):
            if tool.type in (None, "custom"):
                parts = tool.name, tool.description, tool.input_schema
                function = dict(zip(("name", "description", "parameters"), parts, strict=True))
                tools.append({"type": "function", "function": function})
            else:
                skipped.append(f"tools[{i}] ({tool.type})")
        answered = any(message.role == "assistant" for message in self.messages)
        history = HistoryReader("messages", answered)
        messages = [*self._system()]
        for i, message in enumerate(self.messages):
            messages += _messages(message, history, i)
        skipped += history.skipped
        skipped += [name for name in _SKIPPED if extra.get(name)]
        effort = None if config is None else config.effort
        if effort is not None and effort not in get_args(Effort):
            skipped.append(f"output_config (effort {effort:.20})")
            effort = None
        given = {
            "messages": messages,
            "tools": tools or None,
            "tool_choice": choice and choice.of_chat,
            "stop": self.stop_sequences,
            "chat_template_kwargs": self.chat_template_kwargs,
            "top_k": self.top_k,
            "reasoning_effort": effort or extra.get("reasoning_effort"),
        }
        if choice is not None and choice.disable_parallel_tool_use:
            given["parallel_tool_calls"] = False
        thinks = {"enabled": True, "disabled": False}.get(thinking.type if thinking else "")
        if thinks and thinking and limits_thinking:
            given["thinking_token_budget"] = thinking.budget_tokens
        if config is not None and config.format is not None:
            schema = {"name": "answer", "schema": config.format.get("schema")}
            given["response_format"] = {"type": config.format.get("type"), "json_schema": schema}
        last = self.messages[-1] if self.messages else None
        blocks = last.content if last is not None and isinstance(last.content, list) else ()
        called = any(block.get("type") == "tool_use" for block in blocks)
        if last is not None and last.role == "assistant" and not called:
            given |= {"continue_final_message": True, "add_generation_prompt": False}
        return self.chat_of(given, skipped, thinks)

    def _system(self) -> Iterator[dict[str, Any]]:
        reading = HistoryReader("system", False).read(self.system, 0, "user", "system")
        text = "\n".join(text for text in reading.texts if not text.startswith(_BILLING))
        if text:
            yield {"role": "system", "content": text}


def _messages(message: MessageParam, history: HistoryReader, at: int) -> Iterator[dict[str, Any]]:
    """The chat messages that one message stands for: results of tools are messages there."""
    if isinstance(message.content, str):
        yield {"role": message.role, "content": message.content}
        return
    rest, calls = list[Any](), list[dict[str, Any]]()
    results = False
    for block in message.content:
        kind = block.get("type", "text")
        if kind == "tool_result" and message.role == "user":
            results = True
            result = _result(block, history, at)
            yield {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
        elif kind == "tool_use" and message.role == "assistant":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            rest.append(block)
    reading = history.read(rest, at, message.role, "messages")
    # An answer's texts are one text that calls interrupted.
    content = ("" if message.role == "assistant" else "\n").join(reading.texts)
    if content or calls or reading.thoughts or not results:
        more = {"reasoning": reading.thought or None, "tool_calls": calls or None}
        given = {name: value for name, value in more.items() if value is not None}
        yield {"role": message.role, "content": content, **given}


def _result(block: dict[str, Any], history: HistoryReader, at: int) -> str:
    content = block.get("content") or ""
    if not isinstance(content, str | list):
        raise RequestError(
            "messages: the content of a tool_result must be a text or a list of blocks",
            param="messages",
        )
    text = "\n".join(history.read(content, at, "tool", "messages").texts)
    unsaid = block.get("is_error") and "error" not in text[:100].lower()
    return f"Error: {text}" if unsaid else text
