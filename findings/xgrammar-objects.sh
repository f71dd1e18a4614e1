#!/bin/sh
# xgrammar 0.2.9, torch 2.13.0: compile_json_schema of objects and arrays
# Guess: what a schema says holds, or is refused as llguidance refuses it
# Seen: allOf with more than one branch takes any JSON (a warning on stderr alone); uniqueItems, contains, not and dependentRequired are dropped; a name in `required` that is not in `properties` is not required, and refused where additionalProperties is not given (strict_mode); beside patternProperties, additional ones are refused. minProperties counts a name that comes twice, which json reads as one
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xgrammar==0.2.9 torch==2.13.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import xgrammar

compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([n]) for n in range(256)] + [b"</s>"], stop_token_ids=[256]))
number, text = {"type": "integer"}, {"type": "string"}
one = {"type": "object", "properties": {"a": number}, "required": ["a"]}
other = {"type": "object", "properties": {"b": number}, "required": ["b"]}
away = {"type": "object", "properties": {"a": number}, "required": ["b"]}
pattern = {"type": "object", "patternProperties": {"^x": number}, "additionalProperties": text}
two = {"type": "object", "additionalProperties": number, "minProperties": 2}
numbers = {"type": "array", "items": number}
cases = (
    ({"allOf": [one, other]}, '{"a":1}', True), ({"allOf": [one, other]}, "5", True), ({"allOf": [one]}, "5", False),
    ({**numbers, "uniqueItems": True}, "[1, 1]", True), ({**numbers, "contains": {"const": 3}}, "[1]", True),
    ({**number, "not": {"const": 3}}, "3", True), (away, '{"a":1}', True), (away, '{"b":1}', False),
    ({"type": "object", "properties": {"a": number, "b": number}, "dependentRequired": {"a": ["b"]}}, '{"a":1}', True),
    (pattern, '{"x":1}', True), (pattern, '{"y":"s"}', False), (two, '{"a":1}', False), (two, '{"a":1,"a":2}', True),
)
seen = []
for schema, answer, _ in cases:
    follows = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema)))
    seen.append(all(follows.accept_token(byte) for byte in answer.encode()) and follows.accept_token(256))
    print(version("xgrammar"), json.dumps(schema), "takes" if seen[-1] else "refuses", answer)
raise SystemExit(seen != [taken for *_, taken in cases])
PYTHON
