"""The types of arguments that a model writes as plain text, by the whole schema of their tool."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from kvserve.server.parsers.json_text import read_json

_MOST_DEEP = 32
_MOST_STEPS = 5000
"""Schemas within schemas that are looked at for one argument."""
_EITHER = ("anyOf", "oneOf")
_TYPES: dict[str, Any] = {
    **{"string": str, "integer": int, "number": (int, float), "boolean": bool},
    **{"null": type(None), "object": dict, "array": list},
}


class ArgumentTypes:
    """Reads the arguments of one tool by the schema of its parameters."""

    def __init__(self, parameters: Any) -> None:
        self._root = parameters
        self._left = 0

    def _goes_on(self, depth: int) -> bool:
        """Whether to look further: references may go round, and each time twice."""
        self._left -= 1
        return depth <= _MOST_DEEP and self._left > 0

    @cached_property
    def names(self) -> set[str]:
        """The arguments that the schema names."""
        self._left = _MOST_STEPS
        return {name for each in self._objects(self._root, 0) for name in each}

    def read(self, name: str, text: str) -> Any:
        """The value of an argument: the text if that is allowed, else the JSON that it is."""
        self._left = _MOST_STEPS
        found = [each[name] for each in self._objects(self._root, 0) if name in each]
        schema = {"anyOf": found} if found else self._other(self._root)
        stripped = text.strip()
        value = read_json(stripped)
        is_json = value is not None or stripped == "null"
        told = self._tells(schema, 0)
        as_text = told and self._allows(schema, text)
        empty = stripped == "null" or (stripped == "None" and not as_text)
        if empty and told and self._allows(schema, None):
            return None
        if as_text:
            return text
        for each in self._readings(stripped, value, is_json):
            if told and self._allows(schema, each):
                return each
        if not is_json or (told and self._says(schema, "string", 0)):
            return text
        return value

    def _readings(self, stripped: str, value: Any, is_json: bool) -> Iterator[Any]:
        """What a text may stand for, beside itself."""
        if is_json:
            if isinstance(value, float) and value.is_integer():
                yield value
                yield int(value)
            yield value
        if stripped.lower() in ("true", "false"):
            yield stripped.lower() == "true"
        yield stripped

    # ---- the schema -----------------------------------------------------------------------------

    def _objects(self, schema: Any, depth: int) -> Iterator[Mapping[str, Any]]:
        """The properties that a schema has, wherever it has them."""
        schema = self._followed(schema)
        if isinstance(schema, Mapping) and self._goes_on(depth):
            if isinstance(schema.get("properties"), Mapping):
                yield schema["properties"]
            for key in (*_EITHER, "allOf"):
                for each in _listed(schema.get(key)):
                    yield from self._objects(each, depth + 1)
            if "$ref" in schema:
                yield from self._objects(self._target(schema), depth + 1)

    def _other(self, schema: Any) -> Any:
        """The schema of arguments that have no name there."""
        schema = self._followed(schema)
        other = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
        return other if isinstance(other, Mapping) else {}

    def _followed(self, schema: Any) -> Any:
        """What a schema refers to, if it says nothing else."""
        for _ in range(_MOST_DEEP):
            if not isinstance(schema, Mapping) or "$ref" not in schema or len(schema) > 1:
                break
            schema = self._target(schema)
        return schema

    def _target(self, schema: Mapping[str, Any]) -> Any:
        found, path = self._root, str(schema["$ref"])
        if not path.startswith("#"):
            return {}
        for part in filter(None, unquote(path[1:]).split("/")):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping):
                found = found.get(part, {})
            else:
                return {}
        return found

    def _parts(self, schema: Any) -> Iterator[tuple[bool, list[Any]]]:
        """Schemas within one: whether all of them count, and they."""
        if isinstance(schema, Mapping):
            if "$ref" in schema:
                yield True, [self._target(schema)]
            if _listed(schema.get("allOf")):
                yield True, _listed(schema["allOf"])
            yield from ((False, _listed(schema[k])) for k in _EITHER if _listed(schema.get(k)))

    def _tells(self, schema: Any, depth: int) -> bool:
        """Whether a schema says anything about types."""
        if not isinstance(schema, Mapping) or not self._goes_on(depth):
            return False
        if schema.keys() & {"type", "enum", "const", "nullable"}:
            return True
        return any(self._tells(each, depth + 1) for _, all_ in self._parts(schema) for each in all_)

    def _says(self, schema: Any, kind: str, depth: int) -> bool:
        """Whether a type is named somewhere in a schema."""
        if not isinstance(schema, Mapping) or not self._goes_on(depth):
            return False
        if kind in _kinds(schema):
            return True
        parts = self._parts(schema)
        return any(self._says(each, kind, depth + 1) for _, all_ in parts for each in all_)

    def _allows(self, schema: Any, value: Any, depth: int = 0) -> bool:
        """Whether a value has a type, or is a value, that the schema names."""
        if not isinstance(schema, Mapping) or not self._goes_on(depth):
            return schema is not False
        if value is None and schema.get("nullable") is True:
            return True
        kinds = _kinds(schema)
        if kinds and not any(_is(value, kind) for kind in kinds):
            return False
        if "const" in schema and not _same(schema["const"], value):
            return False
        if isinstance(schema.get("enum"), list) and not any(
            _same(each, value) for each in schema["enum"]
        ):
            return False
        return all(
            (all if every else any)(self._allows(each, value, depth + 1) for each in within)
            for every, within in self._parts(schema)
        )


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _kinds(schema: Mapping[str, Any]) -> Collection[Any]:
    kinds = schema.get("type")
    return kinds if isinstance(kinds, list) else [] if kinds is None else [kinds]


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(kind, str) and kind in _TYPES and isinstance(value, _TYPES[kind])


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
