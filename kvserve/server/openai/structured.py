"""What the text must match, by ``response_format``, ``structured_outputs`` or ``tool_choice``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvserve.json_schema import schema_text
from kvserve.log import RequestError, logger
from kvserve.sampling_params import StructuredOutput

GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
"""vLLM's older names for the kinds of ``structured_outputs``."""

_warned: set[str] = set()


def structured_output(fields: Mapping[str, Any]) -> StructuredOutput | None:
    """What the given fields ask for. Raises ``RequestError`` if more than one is given."""
    wanted = []
    if fields.get("response_format") is not None:
        wanted.append(_response_format(fields["response_format"]))
    if fields.get("structured_outputs") is not None:
        wanted.append(StructuredOutput.parse(fields["structured_outputs"]))
    for name in GUIDED:
        if fields.get(name) is not None:
            _warn_once(name)
            kind = name.removeprefix("guided_")
            wanted.append(StructuredOutput.parse({kind: fields[name]}, name))
    found = [one for one in wanted if one is not None]
    if len(found) > 1:
        names = " and ".join(one.field for one in found)
        raise RequestError(f"give one of {names}, not both", param=found[1].field)
    return found[0] if found else None


def _response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    kind, name = value.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object", "", name)
    if kind != "json_schema":
        raise RequestError(
            f"response_format.type must be text, json_object or json_schema, got {kind!r}",
            param=name,
        )
    described = value.get("json_schema")
    schema = described.get("schema") if isinstance(described, Mapping) else None
    if not isinstance(schema, dict):
        raise RequestError("response_format.json_schema.schema must be an object", param=name)
    return StructuredOutput.parse({"json": schema}, name)


def _warn_once(name: str) -> None:
    if name not in _warned:
        _warned.add(name)
        kind = name.removeprefix("guided_")
        logger.warning("%s is an old name; send structured_outputs: {%r: ...}", name, kind)


# ---- tools ------------------------------------------------------------------------------------


def one_call(function: Mapping[str, Any]) -> StructuredOutput:
    """The arguments of one named function, and nothing else."""
    return StructuredOutput("json", schema_text(_parameters(function), "tools", "tools"), "tools")


def some_calls(functions: Sequence[Mapping[str, Any]], parallel: bool) -> StructuredOutput:
    """Calls as ``[{"name": ..., "parameters": {...}}]``; only one unless ``parallel``."""
    shared: dict[str, Any] = {}
    calls = []
    for function in functions:
        parameters = dict(_parameters(function))
        # References start at the root of the document, so definitions must move there.
        for name, definition in parameters.pop("$defs", {}).items():
            if shared.setdefault(name, definition) != definition:
                raise RequestError(f"tools: two different $defs are called {name!r}", param="tools")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    if shared:
        schema["$defs"] = shared
    return StructuredOutput("json", schema_text(schema, "tools", "tools"), "tools")


def _parameters(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """A function's schema. Arguments that it does not name are forbidden unless it allows them."""
    return {
        "additionalProperties": False,
        **(function.get("parameters") or {"type": "object", "properties": {}}),
    }
