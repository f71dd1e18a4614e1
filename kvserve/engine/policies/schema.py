"""What a policy's fields are, for people and as JSON Schema; read off the dataclass."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, Field, fields
from typing import Any

_JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "Mapping[str, Any]": "object",
    "None": "null",
}


def describe(name: str, policy: type[Any]) -> dict[str, Any]:
    """Everything that is said of a policy, from its docstrings, class variables and fields."""
    text = inspect.cleandoc(policy.__doc__ or "").replace("``", "`")
    summary, _, details = text.partition("\n\n")
    source = (inspect.getmodule(policy).__doc__ or "").split("\n")[0].removesuffix(".")
    return {
        "name": name,
        "summary": summary.replace("\n", " "),
        "details": details.replace("\n", " "),
        "source": source if "arXiv" in source else "",
        "cost": policy.cost,
        "avoid": policy.avoid,
        "granularity": policy.granularity.value,
        "args": arguments(policy),
        "schema": json_schema(name, policy),
    }


def arguments(policy: type[Any]) -> list[dict[str, Any]]:
    """Name, type, default, range and help of each field, in words."""
    return [
        {
            "name": f.metadata.get("name") or f.name,
            "type": " or ".join(_JSON_TYPES[t] for t in _types(f) if t != "None"),
            "default": _default(f),
            "range": _range(f.metadata),
            "help": f.metadata.get("help", ""),
        }
        for f in fields(policy)
    ]


def json_schema(name: str, policy: type[Any]) -> dict[str, Any]:
    """JSON Schema of ``kv_policy`` objects of this policy."""
    properties: dict[str, Any] = {"name": {"const": name}}
    for f in fields(policy):
        properties[f.metadata.get("name") or f.name] = _property(f)
    schema: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "required": ["name"],
        "additionalProperties": False,
    }
    if policy.needs:
        schema["anyOf"] = [{"required": [field]} for field in policy.needs]
    return schema


def _property(f: Field[Any]) -> dict[str, Any]:
    types = [_JSON_TYPES[t] for t in _types(f)]
    facts, words = f.metadata, _range(f.metadata)
    found = {
        "type": types[0] if len(types) == 1 else types,
        "default": _default(f),
        "description": f.metadata.get("help", "") + (f" ({words})" if words else ""),
    }
    if facts.get("choices"):
        found["enum"] = [*facts["choices"], *([None] if "null" in types else [])]
    for key, keyword in (("least", "minimum"), ("most", "maximum")):
        if facts.get(key) is not None:
            found[keyword] = facts[key]
    return found


def _default(f: Field[Any]) -> Any:
    return None if f.default is MISSING else f.default


def _types(f: Field[Any]) -> list[str]:
    """The names in a field's annotation: ``["int", "None"]``."""
    text = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
    return [part.strip() for part in text.split("|")]


def _range(facts: Any) -> str:
    """Allowed values in words."""
    least, most, note = facts.get("least"), facts.get("most"), facts.get("note")
    words = []
    if facts.get("choices"):
        *others, last = facts["choices"]
        words.append(f"{', '.join(others)} or {last}" if others else last)
    elif most is not None:
        words.append(f"{least:g} to {most:g}")
    elif least is not None:
        words.append(f"at least {least:g}")
    return "; ".join([*words, note] if note else words)
