"""The client's own tools in ``/v1/responses``: functions, those in namespaces, freeform ones, and
the search for more of them, in the request or among its input.

A model has one kind of tool, a function with a name. Codex has its MCP tools in namespaces, and
refuses a call whose namespace is not apart from its name; a freeform tool takes one text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

from kvserve.server.parsers.json_text import read_object

INPUT = "input"
"""The one argument of freeform tools."""
SEARCH = "tool_search"
CALLS = {"function": "function_call", "custom": "custom_tool_call", SEARCH: "tool_search_call"}
"""Kinds of tools -> the items that call them."""
BRINGS_TOOLS = ("additional_tools", "tool_search_output")
_NO_NAME = re.compile(r"[^a-zA-Z0-9_.-]")
_MOST = 128


@dataclass(frozen=True)
class ClientTool:
    """A tool under the names that the client gave it."""

    name: str
    namespace: str | None = None
    kind: str = "function"

    def item(self) -> dict[str, Any]:
        """The beginning of an item that calls it."""
        if self.kind == SEARCH:
            return {"type": CALLS[SEARCH], "execution": "client"}
        where = {} if self.namespace is None else {"namespace": self.namespace}
        return {"type": CALLS[self.kind], **where, "name": self.name}


@dataclass
class ClientTools:
    """``functions`` as a chat request has them; ``by_name`` says what each name stands for."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    by_name: dict[str, ClientTool] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    _names: dict[ClientTool, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]]
    ) -> ClientTools:
        """Those of a request, and those that items of its input bring."""
        made = cls()
        made._add(tools, "tools", None)
        for at, item in enumerate(items):
            if item.get("type") in BRINGS_TOOLS:
                made._add(loaded(item), f"input[{at}].tools", None)
        return made

    def _add(self, tools: Sequence[Mapping[str, Any]], where: str, namespace: str | None) -> None:
        for at, tool in enumerate(tools):
            kind, inner = tool.get("type"), tool.get("tools")
            if kind == "namespace" and namespace is None and isinstance(inner, list):
                within = [each for each in inner if isinstance(each, Mapping)]
                self._add(within, f"{where}[{at}].tools", str(tool.get("name", "")))
            elif kind in ("function", "custom") or (kind, tool.get("execution")) == (
                SEARCH,
                "client",
            ):
                self._add_one(tool, namespace)
            else:
                self.skipped.append(f"{where}[{at}] ({kind})")

    def _add_one(self, tool: Mapping[str, Any], namespace: str | None) -> None:
        kind = tool["type"]
        own = ClientTool(
            str(tool.get("name") or (SEARCH if kind == SEARCH else "")), namespace, kind
        )
        if own in self._names:
            return  # once more
        name = self._joined(namespace, own.name)
        self.by_name[name], self._names[own] = own, name
        given = {key: value for key, value in tool.items() if key != "type" and value is not None}
        function = _with_input(given) if kind == "custom" else given
        self.functions.append({"type": "function", "function": {**function, "name": name}})

    def _joined(self, namespace: str | None, name: str) -> str:
        """A name of its own, of characters that names may have."""
        if namespace is None:
            return name
        mark = "" if namespace.endswith("_") else "__"
        joined = _NO_NAME.sub("_", f"{namespace}{mark}{name}")[-_MOST:]
        others = (f"{joined[: _MOST - 8]}_{n}" for n in count(len(self.by_name) + 1))
        return next(each for each in chain((joined,), others) if each not in self.by_name)

    def name_of(self, item: Mapping[str, Any]) -> Any:
        """The function's name of an item or a ``tool_choice`` that names a tool of the client.

        A call may be of a tool that is no longer there; a name without its namespace may be the
        joined one, or that of the only tool of that name.
        """
        name, namespace = item.get("name"), item.get("namespace")
        name = SEARCH if item.get("type") in (SEARCH, CALLS[SEARCH]) else name
        if not isinstance(name, str) or (namespace is None and name in self.by_name):
            return name
        if namespace is None:
            same = [each for each, tool in self.by_name.items() if tool.name == name]
            return same[0] if len(same) == 1 else name
        owns = (ClientTool(name, str(namespace), kind) for kind in CALLS)
        found = next((self._names[own] for own in owns if own in self._names), None)
        return found or self._joined(str(namespace), name)

    def choice(self, choice: Any) -> Any:
        """A ``tool_choice`` of a chat request."""
        if not isinstance(choice, Mapping):
            return choice
        if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
            return {**choice, "tools": list(self._allowed(choice["tools"]))}
        return {**choice, "name": self.name_of(choice)}

    def _allowed(self, tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
        for tool in tools:
            if isinstance(tool, Mapping) and tool.get("type") == "namespace":
                names = [n for n, own in self.by_name.items() if own.namespace == tool.get("name")]
                yield from ({"type": "function", "name": name} for name in names)
            elif isinstance(tool, Mapping):
                yield {**tool, "name": self.name_of(tool)}


def _with_input(tool: dict[str, Any]) -> dict[str, Any]:
    """A freeform tool as a function of one text, whose grammar the model is told."""
    form = tool.pop("format", None) or {}
    told = str(tool.get("description") or "")
    if isinstance(form, Mapping) and form.get("definition"):
        told += f"\n\nThe input follows this grammar ({form.get('syntax')}):\n{form['definition']}"
    text = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    return {**tool, "description": told.strip(), "parameters": text}


def loaded(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tools that an item brings."""
    tools = item.get("tools")
    return [tool for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []


def freeform_input(arguments: str) -> str:
    """The text of a freeform call; what there is of it if the answer was cut."""
    value = read_object(arguments).get(INPUT)
    return value if isinstance(value, str) else arguments
