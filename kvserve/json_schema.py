"""JSON schemas that clients send: their text, and how deep they are, references included."""

from __future__ import annotations

import json
from typing import Any

from kvserve.log import RequestError

MAX_DEPTH = 128


def schema_text(schema: Any, name: str, field: str) -> str:
    """A schema, or its text, as JSON text; ``RequestError`` for ``field`` if that cannot be.

    ``name`` is the schema's place in the request, for messages.
    """
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        deep = too_deep(schema)
        text = "" if deep else json.dumps(schema)
    except RecursionError:
        deep = True
    except (TypeError, ValueError) as exc:
        raise RequestError(f"{name} is not JSON: {exc}", param=field) from None
    if deep:
        raise RequestError(
            f"{name} is deeper than {MAX_DEPTH} levels, those behind $ref included",
            param=field,
            code="invalid_grammar",
        )
    return text


def too_deep(schema: Any) -> bool:
    """Whether the schema has more than ``MAX_DEPTH`` levels, those that a ``$ref`` adds included.

    A schema may refer to itself: a reference to a place that is being read adds no level.
    """
    return _Levels(schema).of(schema, MAX_DEPTH) > MAX_DEPTH


class _Levels:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}

    def of(self, node: Any, left: int) -> int:
        """Levels of ``node``; below more than ``left`` of them nothing is read."""
        if not isinstance(node, dict | list):
            return 0
        if left < 0:
            return 1
        if (known := self._known.get(id(node))) is not None:
            return known
        self._known[id(node)] = 0  # while it is being read
        below = list(node.values()) if isinstance(node, dict) else list(node)
        if isinstance(node, dict) and isinstance(node.get("$ref"), str):
            below.append(self._named(node["$ref"]))
        depth = 1 + max((self.of(child, left - 1) for child in below), default=0)
        self._known[id(node)] = depth
        return depth

    def _named(self, reference: str) -> Any:
        """What ``#/...`` points to; ``None`` if it is nothing in this schema."""
        node = self._root
        for part in reference.lstrip("#").strip("/").split("/") if reference != "#" else ():
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
        return node if reference.startswith("#") else None
