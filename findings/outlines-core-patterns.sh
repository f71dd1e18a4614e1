#!/bin/sh
# outlines-core 0.2.14: what build_regex_from_schema makes of patterns, lengths and bounds of JSON schemas
# Guess: what matches is JSON, and what is not read is refused
# Seen: of the pattern ^a|b$ it makes ("a|b"), which the half string "a matches; beside minLength a pattern is dropped, and minimum and multipleOf always, with no word; a number's exponent has to have a sign
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

seen = []
for schema, text in (
    ({"type": "string", "pattern": "^a|b$"}, '"a'),
    ({"type": "string", "pattern": "^a|b$"}, '"a"'),
    ({"type": "string", "pattern": "^(a|b)$"}, '"a"'),
    ({"type": "string", "pattern": "^a*$", "minLength": 2}, '"xyz"'),
    ({"type": "integer", "minimum": 5, "multipleOf": 2}, "-3"),
    ({"type": "number"}, "1e+5"),
    ({"type": "number"}, "1e5"),
):
    pattern = build_regex_from_schema(json.dumps(schema))
    seen.append(re.fullmatch(pattern, text) is not None)
    print(version("outlines-core"), json.dumps(schema), "takes" if seen[-1] else "refuses", text)
raise SystemExit(seen != [True, False, True, True, True, True, False])
PYTHON
