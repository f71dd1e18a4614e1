#!/bin/sh
# lm-format-enforcer 0.11.3: JSON that its JsonSchemaParser lets through, character by character
# Guess: what it lets through is JSON, and keeps to the schema; a keyword that it does not know is refused
# Seen: where b may follow a, {"a":1,} goes through, and is no JSON; minimum, maximum, multipleOf and format are passed over; oneOf of integer and number refuses both; const 5 raises AttributeError
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q lm-format-enforcer==0.11.3
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from lmformatenforcer import JsonSchemaParser


def taken(schema, text):
    try:
        parser = JsonSchemaParser(schema)
        for character in text:
            if character not in parser.get_allowed_characters():
                return False
            parser = parser.add_character(character)
        return parser.can_end()
    except AttributeError as error:
        return str(error)


integer = {"type": "integer"}
cases = [
    ({"type": "object", "properties": {"a": integer, "b": integer}, "required": ["a"]}, '{"a":1,}', True),
    ({**integer, "minimum": 3, "maximum": 5}, "9", True),
    ({**integer, "multipleOf": 5}, "7", True),
    ({"type": "string", "format": "date"}, '"x"', True),
    ({"oneOf": [integer, {"type": "number"}]}, "1.5", False),
    ({"oneOf": [integer, {"type": "number"}]}, "1", False),
    ({"const": 5}, "5", "'int' object has no attribute 'startswith'"),
]
seen = [taken(schema, text) for schema, text, _ in cases]
for (schema, text, _), what in zip(cases, seen):
    print(version("lm-format-enforcer"), json.dumps(schema), text, "->", what)
try:
    is_json = bool(json.loads(cases[0][1]))
except ValueError as error:
    is_json = False
    print("json:", error)
raise SystemExit(seen != [wanted for *_, wanted in cases] or is_json)
PYTHON
