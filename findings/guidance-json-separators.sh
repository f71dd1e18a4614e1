#!/bin/sh
# guidance 0.3.1: white space in the JSON that guidance.json takes by itself
# Guess: any that JSON allows, as llguidance, which it is built on, allows; {"a":1} at least
# Seen: one form alone, that of Python's json.dumps: {"a": 1} and [1, 2] are taken, {"a":1} and [1,2] are not; whitespace_flexible=True takes both
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q guidance==0.3.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from guidance import json

schemas = {"a": {"type": "integer"}, "b": {"type": "array", "items": {"type": "integer"}}}
texts = {'{"a":1}': "a", '{"a": 1}': "a", '{ "a": 1 }': "a", '{"b": [1,2]}': "b", '{"b": [1, 2]}': "b"}
seen = {}
for settings in ({}, {"whitespace_flexible": True}):
    for text, name in texts.items():
        schema = {"type": "object", "properties": {name: schemas[name]}, "required": [name]}
        seen[text, *settings] = json(schema=schema, **settings).match(text) is not None
print(version("guidance"), "taken:", [key for key, taken in seen.items() if taken], "not:", [key for key, taken in seen.items() if not taken])
raise SystemExit(list(seen.values()) != [False, True, False, False, True, True, True, True, True, True])
PYTHON
