#!/bin/sh
# outlines-core 0.2.14: build_regex_from_schema for two objects in allOf, names with a quotation mark, types given as a list, and escapes
# Guess: what the expression matches is JSON; an object in allOf has the names of both; ["object", "null"] takes null
# Seen: allOf writes the schemas one behind the other: {"a":1}{"b":2} is matched, and {"a":1,"b":2} is not; a name is put in as it stands, so one with a quotation mark, a backslash or a line end matches only what no parser reads; beside "properties" a list of types is taken for "object" alone: null is refused. "items" behind prefixItems are dropped. A string may have no \u escape, so what json.dumps writes beyond ASCII is refused
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q outlines-core==0.2.14
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import re
from importlib.metadata import version

from outlines_core.json_schema import build_regex_from_schema

number = {"type": "integer"}


def thing(name, **more):
    return {"type": "object", "properties": {name: number}, "required": [name], **more}


cases = {
    "allOf": ({"allOf": [thing("a"), thing("b")]}, {'{"a":1}{"b":2}': True, '{"a":1,"b":2}': False}),
    "quotation mark": (thing('"'), {'{"\\"":1}': False, '{""":1}': True}), "line end": (thing("\n"), {'{"\\n":1}': False, '{"\n":1}': True}),
    "or null": (thing("a", type=["object", "null"]), {"null": False, '{"a":1}': True}),
    "escapes": ({"type": "string"}, {json.dumps("\u00e9"): False, '"\u00e9"': True, '"\\n"': True}),
    "more items": ({"type": "array", "prefixItems": [number], "items": number}, {"[1]": True, "[1,2]": False}),
}
seen = {}
for name, (schema, texts) in cases.items():
    expression = build_regex_from_schema(json.dumps(schema))
    seen[name] = {text: bool(re.fullmatch(expression, text)) for text in texts}
print("outlines-core", version("outlines-core"), "matched:", seen)
raise SystemExit(seen != {name: texts for name, (_, texts) in cases.items()})
PYTHON
