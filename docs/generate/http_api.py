"""``reference/http.md``: routes, fields and answers, taken from the server's OpenAPI schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs.generate.markdown import prose, table
from kvserve.server.http.app import create_app
from kvserve.server.state.server_state import ServerState

Schema = Mapping[str, Any]

_INTRO = """\
# HTTP API

A running server has the same at `/openapi.json` and, to read, at `/docs`. [The
server](../server.md) says which fields depend on flags, what is refused and how errors look. A
field with a default may be left out.
"""
_OK = "200"


def page(state: ServerState) -> str:
    """The page: every route, then every object that a route takes or gives."""
    api = create_app(state).openapi()
    parts = [_INTRO, table(*_routes(api))]
    for name, schema in sorted(api["components"]["schemas"].items()):
        if "properties" in schema:
            parts += [f"## {name}\n", prose(schema.get("description")), table(*_fields(schema))]
    return "\n".join(part for part in parts if part)


def _routes(api: Schema) -> tuple[list[str], list[list[str]]]:
    rows = []
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            takes = route.get("requestBody", {}).get("content", {})
            gives = route["responses"].get(_OK, {}).get("content", {})
            about = prose(route.get("description"))
            rows.append([f"`{method.upper()} {path}`", about, _body(takes), _body(gives)])
    return ["route", "what it does", "takes", "gives"], rows


def _body(content: Schema) -> str:
    if "application/json" not in content:
        return ", ".join(content)
    kind = _type(content["application/json"]["schema"])
    return kind if kind != "any" else "JSON"


def _fields(schema: Schema) -> tuple[list[str], list[list[str]]]:
    needed = schema.get("required", ())
    rows = []
    for name, field in schema["properties"].items():
        default = "*required*" if name in needed else f"`{json.dumps(field.get('default'))}`"
        rows.append([f"`{name}`", _type(field), default, prose(field.get("description"))])
    head = ["field", "type", "default", "meaning"]
    if not any(row[3] for row in rows):
        return head[:3], [row[:3] for row in rows]
    return head, rows


def _type(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return " or ".join(dict.fromkeys(map(_type, schema[key])))
    if "enum" in schema or "const" in schema:
        return " or ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "properties" in schema and "title" in schema:
        return f"{schema['title']} ({', '.join(f'`{name}`' for name in schema['properties'])})"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    bounds = [f"{word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema]
    return kind + (f" ({', '.join(bounds)})" if bounds else "")


_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "at least",
    "maxLength": "at most",
}
