"""Describes a policy's fields in words and as JSON Schema, from its dataclass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any

from kvserve.engine.policies.parts.arguments import counts_tokens, most_of, relations, types_of

_JSON_TYPES = {
    "int": "integer",
    "float": "number",
    "str": "string",
    "bool": "boolean",
    "Mapping[str, Any]": "object",
    "None": "null",
}


def describe(name: str, policy: type[Any]) -> dict[str, Any]:
    """The full description of a policy, from its docstrings, class variables and fields: of each
    field its name, type, default, range and help in words, and JSON Schema of ``kv_policy``."""
    text = inspect.cleandoc(policy.__doc__ or "").replace("``", "`")
    summary, _, details = text.partition("\n\n")
    source = (inspect.getmodule(policy).__doc__ or "").partition("\n\n")[0]
    source = " ".join(source.split()).removesuffix(".")
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"const": name}, **{f.name: _property(f) for f in fields(policy)}},
        "required": ["name"],
        "additionalProperties": False,
    }
    if policy.needs:
        schema["anyOf"] = [{"required": [field]} for field in policy.needs]
    return {
        "name": name,
        "summary": summary.replace("\n", " "),
        "details": details.replace("\n", " "),
        "source": source if "arXiv" in source else "",
        "cost": policy.cost,
        "avoid": policy.avoid,
        "granularity": policy.granularity.value,
        "args": [
            {
                "name": f.name,
                "type": " or ".join(_JSON_TYPES[t] for t in types_of(f) if t != "None"),
                "default": _default(f),
                "range": _range(f.metadata),
                "help": f.metadata.get("help", ""),
            }
            for f in fields(policy)
        ],
        "schema": schema,
    }


def _property(f: Field[Any]) -> dict[str, Any]:
    types = [_JSON_TYPES[t] for t in types_of(f)]
    facts, words = f.metadata, _range(f.metadata)
    found = {
        "type": types[0] if len(types) == 1 else types,
        "default": _default(f),
        "description": facts.get("help", "") + (f" ({words})" if words else ""),
    }
    if facts.get("choices"):
        found["enum"] = [*facts["choices"], *([None] if "null" in types else [])]
    for keyword, bound in (("minimum", facts.get("least")), ("maximum", most_of(f))):
        if bound is not None:
            found[keyword] = bound
    if counts_tokens(f):
        found["x-context"] = True
    return found


def _default(f: Field[Any]) -> Any:
    return None if f.default is MISSING else f.default


def _range(facts: Mapping[str, Any]) -> str:
    """Allowed values in words; the context as a bound of token counts is left out."""
    least, most = facts.get("least"), facts.get("most")
    words = []
    if facts.get("choices"):
        *others, last = facts["choices"]
        words.append(f"{', '.join(others)} or {last}" if others else last)
    elif most is not None:
        words.append(f"{least:g} to {most:g}")
    elif least is not None:
        words.append(f"at least {least:g}")
    if facts.get("odd"):
        words.append("odd")
    notes = [*relations(facts), *filter(None, [facts.get("note")])]
    notes += [f"only with {condition}" for condition in facts.get("only_if", ())]
    return "; ".join([*words, ", ".join(notes)] if notes else words)
