"""Which tools a request lets a model call, in the forms that clients send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from kvserve.log import RequestError, shown

Mode = Literal["none", "auto", "required"]
_WORDS: dict[Any, Mode] = {
    **{"none": "none", "auto": "auto", "required": "required"},
    "any": "required",
}
_FUNCTIONS = ("function", "custom")


@dataclass(frozen=True)
class NamedTool:
    """One function has to be called."""

    name: str


@dataclass(frozen=True)
class AllowedTools:
    """Only these functions may be called, or one of them has to be."""

    mode: Mode
    names: tuple[str, ...]


def tool_name(named: Mapping[str, Any]) -> str | None:
    """The name that an object has itself (responses) or in its ``function`` (chat)."""
    inner = named.get(str(named.get("type")))
    name = (inner if isinstance(inner, Mapping) else named).get("name")
    return name if isinstance(name, str) and named.get("type") in _FUNCTIONS else None


def parse_tool_choice(value: Any) -> Mode | NamedTool | AllowedTools | None:
    """``RequestError`` for what names no function of the client."""
    if value is None or isinstance(value, NamedTool | AllowedTools):
        return value
    kind = value.get("type") if isinstance(value, Mapping) else value
    if isinstance(kind, str) and kind in _WORDS:
        return _WORDS[kind]
    if not isinstance(value, Mapping) or not isinstance(kind, str):
        raise RequestError(
            "tool_choice must be 'none', 'auto' or 'required', or an object that names a function "
            f"or allowed_tools, got {shown(value)}"
        )
    if kind == "allowed_tools":
        return _allowed(value.get("allowed_tools", value))
    if kind not in _FUNCTIONS:
        raise RequestError(
            f"tool_choice: this server has no tool of type {shown(kind)}; name a function, or send "
            "'auto'"
        )
    name = tool_name(value)
    if name is None:
        raise RequestError("tool_choice must have the function's name")
    return NamedTool(name)


def _allowed(value: Any) -> AllowedTools:
    tools = value.get("tools") if isinstance(value, Mapping) else None
    mode = value.get("mode", "auto") if isinstance(value, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list):
        raise RequestError(
            "tool_choice: allowed_tools have a mode ('auto' or 'required') and a list of tools"
        )
    names = [tool_name(tool) for tool in tools if isinstance(tool, Mapping)]
    return AllowedTools(mode, tuple(name for name in names if name is not None))


ToolChoice = Annotated[
    Mode | NamedTool | AllowedTools | None,
    PlainValidator(parse_tool_choice, json_schema_input_type=str | dict[str, Any] | None),
]
