"""Bodies that make each field of the OpenAPI document as large as it may be, one at a time.

``python -m bench.soak.fields`` sends them to a server and measures what each costs its event loop.
A field that is added to the document is tried from then on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.soak.report import Check
from bench.soak.served import Served, resident

LOOP_SECONDS, MEMORY = 0.05, 8
"""CPU seconds of the event loop, and bytes for each byte of the body, that a field may cost."""
_SPARE = 64
"""MiB that a server may grow by beside that: its allocator keeps some."""
_DEEPEST = 5
_MARK = "\ufffehere"
_BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
}
_MULTIPLIED = {
    "/v1/completions": {"n": 64},
    "/v1/chat/completions": {"n": 64},
}
_FILLS = {
    "string": ("text", "brackets"),
    "array": ("lists", "numbers", "texts", "objects"),
    "object": ("keys", "lists within"),
}
_FREE: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "json_schema", "json_schema": {"name": "a", "schema": _MARK}},),
    "structured_outputs": tuple({kind: _MARK} for kind in ("json", "choice", "regex", "grammar")),
    "text": ({"format": {"type": "json_schema", "name": "a", "schema": _MARK}},),
    "input": (
        [{"role": "user", "content": _MARK}],
        [{"type": "function_call", "call_id": "a", "name": "f", "arguments": _MARK}],
        [{"type": "function_call_output", "call_id": "a", "output": _MARK}],
        [{"type": "reasoning", "content": [{"type": "text", "text": _MARK}]}],
    ),
}
"""What the document calls an object, and the server knows more of."""


@dataclass(frozen=True)
class Body:
    """A body whose field ``field`` holds ``fill`` as often as it fits."""

    path: str
    field: str
    fill: str
    text: bytes


def bodies(document: Mapping[str, Any], size: int, multiply: bool = False) -> Iterator[Body]:
    """Each field that holds a list, a map or a text, filled up to ``size`` bytes in several ways.

    With ``multiply`` the request also asks for many choices.
    """
    for path, methods in document["paths"].items():
        described = methods.get("post", {}).get("requestBody")
        if described is None:
            continue
        schema = described["content"]["application/json"]["schema"]
        for kind in _kinds(schema, document):
            base = {**_minimal(kind, document), **_BASE.get(path, {})}
            base |= _MULTIPLIED.get(path, {}) if multiply else {}
            marked = [
                (".".join(map(str, place)), types, _placed(base, place, kind, document))
                for place, types in _places(kind, document, ())
            ]
            for name in _FREE.keys() & kind.get("properties", {}).keys():
                for i, wrapper in enumerate(_FREE[name]):
                    marked.append((f"{name}({i})", set(_FILLS), {**base, name: wrapper}))
            for field, types, body in marked:
                for fill in dict.fromkeys(f for t in sorted(types) for f in _FILLS[t]):
                    text = json.dumps(body).encode()
                    filled = text.replace(json.dumps(_MARK).encode(), _filled(fill, size))
                    yield Body(path, field, fill, filled)


def _kinds(schema: Mapping[str, Any], document: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The schemas that a value may have, without references."""
    if "$ref" in schema:
        found: Any = document
        for part in schema["$ref"].removeprefix("#/").split("/"):
            found = found[part]
        return _kinds(found, document)
    several = schema.get("anyOf") or schema.get("oneOf")
    if several:
        return [kind for one in several for kind in _kinds(one, document)]
    return [dict(schema)]


def _places(
    schema: Mapping[str, Any], document: Mapping[str, Any], before: tuple[Any, ...]
) -> Iterator[tuple[tuple[Any, ...], set[str]]]:
    """Where in an object something large may be, and of which types."""
    if len(before) > _DEEPEST:
        return
    named = dict(schema.get("properties", {}))
    if before and schema.get("additionalProperties"):
        named["further"] = {}
    for name, each in named.items():
        place = (*before, name)
        kinds = _kinds(each, document)
        types = {kind.get("type", "any") for kind in kinds if "enum" not in kind}
        types = {"array", "object", "string"} if "any" in types else types & _FILLS.keys()
        if types:
            yield place, types
        for kind in kinds:
            if kind.get("type") == "object":
                yield from _places(kind, document, place)
            elif kind.get("type") == "array":
                for item in _kinds(kind.get("items", {}), document):
                    yield from _places(item, document, (*place, 0))


def _minimal(schema: Mapping[str, Any], document: Mapping[str, Any]) -> Any:
    """The smallest value that a schema allows."""
    kind = _kinds(schema, document)[0]
    if "const" in kind or "enum" in kind:
        return kind.get("const", kind.get("enum", [None])[0])
    if kind.get("type") == "object":
        needed = kind.get("required", ())
        return {name: _minimal(kind["properties"][name], document) for name in needed}
    return {"array": [], "string": "f", "integer": 1, "number": 1, "boolean": True}.get(
        kind.get("type", ""), "f"
    )


def _placed(
    base: Any, place: tuple[Any, ...], schema: Mapping[str, Any], document: Mapping[str, Any]
) -> Any:
    """``base`` with the mark at a place, and what is needed around it."""
    if not place:
        return _MARK
    first, rest = place[0], place[1:]
    if first == 0:
        kinds = [k for k in _kinds(schema, document) if k.get("type") == "array"]
        item = (kinds[0] if kinds else {}).get("items", {})
        return [_placed(_minimal(item, document), rest, item, document)]
    kinds = [k for k in _kinds(schema, document) if first in k.get("properties", {})]
    below = kinds[0]["properties"][first] if kinds else {}
    held = base if isinstance(base, dict) else _minimal(kinds[0] if kinds else {}, document)
    held = held if isinstance(held, dict) else {}
    return {**held, first: _placed(held.get(first), rest, below, document)}


def _filled(fill: str, size: int) -> bytes:
    if fill == "text":
        return b'"%b"' % (b"a b, c! " * (size // 8))
    if fill == "brackets":
        return b'"%b"' % (b"[" * size)
    if fill == "keys":
        return b"{%b}" % b",".join(b'"%d":0' % i for i in range(size // 10))
    one = {"lists": b"[]", "numbers": b"1", "texts": b'""', "objects": b"{}"}.get(fill, b"[]")
    listed = b"[%b]" % b",".join([one] * (size // (len(one) + 1)))
    return b'{"a":%b}' % listed if fill == "lists within" else listed


# ---- what they cost a server --------------------------------------------------------------------


def run_fields(served: Served, size: int) -> list[dict[str, Any]]:
    """Send every body; what each costs the event loop, and what the server's memory grows by."""
    document = httpx.get(f"{served.url}/openapi.json", timeout=60).json()
    headers = {"Content-Type": "application/json"}
    rows = []
    with httpx.Client(base_url=served.url, timeout=300, headers=headers) as http:
        for multiply in (False, True):
            for body in bodies(document, size, multiply):
                grown, spent = resident(served.process.pid), list[float]()
                # Twice if it was much: a page or a cache that another program took costs, too.
                while not spent or (spent[-1] > LOOP_SECONDS and len(spent) < 2):
                    before = loop_seconds(served.process.pid)
                    status = http.post(body.path, content=body.text).status_code
                    spent.append(loop_seconds(served.process.pid) - before)
                rows.append(
                    {
                        **{"path": body.path, "field": body.field, "fill": body.fill},
                        **{"multiplied": multiply, "status": status, "bytes": len(body.text)},
                        "loop_s": round(min(spent), 4),
                        "growth_mib": round(resident(served.process.pid) - grown, 1),
                    }
                )
    return rows


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The requirements on each field."""
    loop = max(row["loop_s"] for row in rows)
    memory = max(row["growth_mib"] - MEMORY * row["bytes"] / 2**20 for row in rows)
    wrong = sum(row["status"] >= 500 for row in rows)
    return [
        Check("CPU of the event loop for one body, s", LOOP_SECONDS, loop, "<="),
        Check("memory beyond 8 times the body, MiB", _SPARE, round(memory, 1), "<="),
        Check("bodies that are answered with 5xx", 0, wrong, "=="),
    ]


def loop_seconds(pid: int) -> float:
    """CPU seconds of a process's first thread, which runs the event loop."""
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak.fields", description=__doc__)
    parser.add_argument("--size", type=float, default=15.0, help="MiB of a field")
    args = parser.parse_args()
    served = Served(("--model", "kvserve/tiny", "--disable-uvicorn-access-log"))
    served.start()
    try:
        rows = run_fields(served, int(args.size * 2**20))
    finally:
        served.stop()
    for key in ("loop_s", "growth_mib"):
        for row in sorted(rows, key=lambda row: -row[key])[:12]:
            sys.stdout.write(f"{json.dumps(row)}\n")
    found = checks(rows)
    for check in found:
        sys.stdout.write(f"{check}\n")
    return 0 if all(check.holds for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
