#!/bin/sh
# outlines-core 0.2.14: build_regex_from_schema of objects and arrays
# Guess: what it does not know of a schema raises, as an unknown format does; what it knows takes every value that fits
# Seen: patternProperties, dependentRequired, minProperties, uniqueItems and contains are dropped: {"x": "s"} is taken where x has to be a number, and {"x": 1}, which fits, is refused. A name in `required` that is not in `properties` is not required, and refused. additionalProperties beside properties are refused; prefixItems have to be all there ([1] is refused). allOf takes no object at all that has to have two names
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

number, text = {"type": "integer"}, {"type": "string"}
one = {"type": "object", "properties": {"a": number}, "required": ["a"]}
other = {"type": "object", "properties": {"b": number}, "required": ["b"]}
cases = (
    ({"type": "object", "patternProperties": {"^x": number}, "additionalProperties": text}, '{"x":"s"}', True),
    ({"type": "object", "patternProperties": {"^x": number}, "additionalProperties": text}, '{"x":1}', False),
    ({"type": "object", "properties": {"a": number}, "required": ["b"]}, '{"a":1}', True),
    ({"type": "object", "properties": {"a": number}, "required": ["b"]}, '{"a":1,"b":1}', False),
    ({**one, "additionalProperties": text}, '{"a":1,"b":"x"}', False),
    ({"type": "object", "additionalProperties": number, "minProperties": 2}, '{"a":1}', True),
    ({"type": "array", "items": number, "uniqueItems": True}, "[1,1]", True),
    ({"type": "array", "items": number, "contains": {"const": 3}}, "[1]", True),
    ({"type": "array", "prefixItems": [number, text]}, "[1]", False),
    ({"type": "array", "prefixItems": [number, text]}, '[1,"a"]', True),
    ({"allOf": [one, other]}, '{"a":1,"b":2}', False),
    (one, '{"a":1}', True),
)
seen = []
for schema, answer, _ in cases:
    seen.append(re.fullmatch(build_regex_from_schema(json.dumps(schema)), answer) is not None)
    print(version("outlines-core"), json.dumps(schema), "takes" if seen[-1] else "refuses", answer)
raise SystemExit(seen != [taken for *_, taken in cases])
PYTHON
