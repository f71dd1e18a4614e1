"""JSON schemas that clients send: their text, how deep they are, and schemas within others."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from kvserve.json_pattern import rust_pattern
from kvserve.log import RequestError

MAX_DEPTH = 128
COMPACT: dict[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": True,
}
"""How llguidance reads schemas. White space is fixed: if it were free, a model might never get to
the end of a document. Of ``oneOf`` any is allowed: a grammar cannot say "only one"."""
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
        *("uuid", "unknown"),
    )
)
"""Those of strings that llguidance enforces. Others are annotations (2020-12, section 7.2.1)."""
_STEPS = 2**32 // 10
_LENGTHS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_DATA = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_MAX_NAMES = 2**17
_SAID_OF_NAMES = {"type", "title", "description"}
"""What says nothing of which names there may be: they are strings."""
_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
)
"""Keywords whose values are maps of schemas, by names that are no keywords."""


def schema_text(schema: Any, name: str, field: str) -> str:
    """A schema, or its text, as JSON text; ``RequestError`` for ``field`` if that cannot be.

    ``name`` is the schema's place in the request, for messages.
    """
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        deep = _is_too_deep(schema)
        names = _PropertyNames(schema, name, field)
        read = partial(_as_read, names=names, name=name, field=field)
        text = "" if deep else json.dumps(each_schema(schema, read), allow_nan=False)
    except RecursionError:
        deep = True
    except RequestError:
        raise
    except (TypeError, ValueError) as exc:
        raise RequestError(f"{name} is not JSON: {exc}", param=field) from None
    if deep:
        raise RequestError(
            f"{name} is deeper than {MAX_DEPTH} levels, those behind $ref included",
            param=field,
            code="invalid_grammar",
        )
    return text


def within(schema: Any, name: str) -> Any:
    """A schema as it must be to stand at ``#/$defs/NAME`` of another: its references to itself and
    its anchors are changed. Its definitions may be called what those of others are called."""

    def moved(node: dict[str, Any]) -> dict[str, Any]:
        node = {key: value for key, value in node.items() if key not in ("$schema", "$id")}
        reference, anchor = node.get("$ref"), node.get("$anchor")
        if isinstance(reference, str) and reference.startswith("#"):
            path = reference[1:]
            own = f"/$defs/{name}{path}" if path[:1] in ("", "/") else f"{name}-{path}"
            node["$ref"] = "#" + own
        if isinstance(anchor, str):
            node["$anchor"] = f"{name}-{anchor}"
        return node

    return each_schema(schema, moved)


def _as_read(node: dict[str, Any], names: _PropertyNames, name: str, field: str) -> dict[str, Any]:
    """A schema in the dialect that llguidance reads: it passes over what it does not know, refuses
    an unknown ``$schema``, and fails at the bounds of 64-bit numbers."""
    made = dict(names.read(node))
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    if isinstance(made.get("pattern"), str):
        made["pattern"] = rust_pattern(made["pattern"])
    if isinstance(made.get("patternProperties"), dict):
        made["patternProperties"] = {
            rust_pattern(names): one for names, one in made["patternProperties"].items()
        }
    if "json-schema.org/" not in str(made.get("$schema", "json-schema.org/")):
        del made["$schema"]
    for bound, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        flag = made.get(exclusive)
        if isinstance(flag, bool):  # draft 4, and OpenAPI 3.0
            del made[exclusive]
            if flag and bound in made:
                made[exclusive] = made.pop(bound)
        for limit in (bound, exclusive):
            if isinstance(made.get(limit), int | float) and not _breakable(limit, made):
                del made[limit]
    if not _is_counted(made.get("multipleOf", 1)):
        raise RequestError(
            f"{name}: multipleOf {made['multipleOf']} cannot be enforced while a text is "
            "generated; leave it out and check the answer",
            param=field,
            code="invalid_grammar",
        )
    for length in _LENGTHS & made.keys():
        if isinstance(made[length], float) and made[length].is_integer():
            made[length] = int(made[length])
    if made.pop("nullable", False) is True:
        made |= _with_null(made)
    return made


def _with_null(node: dict[str, Any]) -> dict[str, Any]:
    """What a schema says of types, with null among them: OpenAPI 3.0's ``nullable``, which
    transformers writes for a function's argument that may be None."""
    kinds = node.get("type")
    either: list[Any] = [{"type": "null"}]
    null: dict[str, list[Any]] = {"type": ["null"], "enum": [None], "anyOf": either}
    null["oneOf"] = either
    said = {**node, "type": [kinds]} if isinstance(kinds, str) else node
    return {
        key: [*said[key], *(one for one in more if one not in said[key])]
        for key, more in null.items()
        if isinstance(said.get(key), list)
    }


class _PropertyNames:
    """``propertyNames``, which llguidance does not read, as a pattern of the properties that
    nothing else names: pydantic writes it for a dict whose keys are an enum, zod for any record.
    ``$ref`` may name a long enum many times, so the patterns' characters are counted."""

    def __init__(self, root: Any, name: str, field: str) -> None:
        self._root, self._name, self._field = root, name, field
        self._left = _MAX_NAMES

    def read(self, node: dict[str, Any]) -> dict[str, Any]:
        names, own = node.get("propertyNames"), node.get("properties", {})
        if isinstance(names, dict) and names.keys() - _SAID_OF_NAMES == {"$ref"}:
            names = named(self._root, str(names["$ref"]))
        if not (isinstance(names, dict) and isinstance(own, dict)) or "patternProperties" in node:
            return node
        kept = names.keys() - _SAID_OF_NAMES
        rest = {key: value for key, value in node.items() if key != "propertyNames"}
        if not kept and names.get("type", "string") == "string":
            return rest
        if kept == {"enum"} and isinstance(names["enum"], list):
            self._count(names["enum"])
            allowed = dict.fromkeys(one for one in names["enum"] if isinstance(one, str))
            own = {one: schema for one, schema in own.items() if one in allowed}
            others = [re.escape(one) for one in allowed if one not in own]
            pattern = f"^(?:{'|'.join(others)})$" if others else "[]"
        elif kept == {"pattern"} and isinstance(names["pattern"], str) and not own:
            pattern = names["pattern"]
            self._count([pattern])
        else:
            return node
        made = {**rest, "properties": own, "additionalProperties": False}
        made["patternProperties"] = {pattern: node.get("additionalProperties", True)}
        return made

    def _count(self, names: list[Any]) -> None:
        self._left -= len(names)
        if self._left >= 0:
            self._left -= sum(len(one) for one in names if isinstance(one, str))
        if self._left < 0:
            raise RequestError(
                f"{self._name} has propertyNames of more than {_MAX_NAMES} characters, those "
                "behind $ref included",
                param=self._field,
                code="invalid_grammar",
            )


def _breakable(bound: str, node: dict[str, Any]) -> bool:
    """Whether a number of 64 bits can break a bound. It cannot break those of its own type, which
    generators of schemas write all the same."""
    whole, limit = node.get("type") == "integer", node[bound]
    lowest, highest = (-(2**63), 2**64 - 1) if whole else (-sys.float_info.max, sys.float_info.max)
    outermost = lowest if bound.endswith("inimum") else highest
    if limit == outermost:
        return bound.startswith("exclusive")
    return bool(limit > outermost) is bound.endswith("inimum")


def _is_counted(factor: Any) -> bool:
    """Whether llguidance can count in steps of ``factor``: it makes a whole number of it, tenfold
    by tenfold, which has to fit 32 bits with one more digit."""
    while isinstance(factor, float) and not factor.is_integer() and factor <= _STEPS:
        factor *= 10
    return not isinstance(factor, int | float) or abs(factor) <= _STEPS


def each_schema(schema: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A copy of which ``change`` has changed each object that is a schema."""
    if isinstance(schema, list):
        return [each_schema(one, change) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in change(schema).items():
        if key in _MAPS and isinstance(value, dict):
            made[key] = {name: each_schema(one, change) for name, one in value.items()}
        else:
            made[key] = value if key in _DATA else each_schema(value, change)
    return made


def _is_too_deep(schema: Any) -> bool:
    """Whether the schema has more than ``MAX_DEPTH`` levels, those that a ``$ref`` adds included.

    A schema may refer to itself: a reference to a place that is being read adds no level.
    """
    known: dict[int, int] = {}

    def levels(node: Any, left: int) -> int:
        """Levels of ``node``; below more than ``left`` of them nothing is read."""
        if not isinstance(node, dict | list):
            return 0
        if left < 0:
            return 1
        if id(node) not in known:
            known[id(node)] = 0  # while it is being read
            below = list(node.values()) if isinstance(node, dict) else list(node)
            if isinstance(node, dict) and isinstance(node.get("$ref"), str):
                below.append(named(schema, node["$ref"]))
            known[id(node)] = 1 + max((levels(each, left - 1) for each in below), default=0)
        return known[id(node)]

    return levels(schema, MAX_DEPTH) > MAX_DEPTH


def named(schema: Any, reference: str) -> Any:
    """What ``#/...`` points to; ``None`` if it is nothing in this schema."""
    node = schema
    for part in reference.lstrip("#").strip("/").split("/") if reference != "#" else ():
        key = part.replace("~1", "/").replace("~0", "~")
        node = node.get(key) if isinstance(node, dict) else None
    return node if reference.startswith("#") else None
