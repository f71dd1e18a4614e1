#!/bin/sh
# xgrammar 0.2.8: keywords of a JSON schema that stand without a type, or beside $ref
# Guess: enforced, or refused as unknown
# Seen: passed over, with no word: minimum, minLength and required without type, minimum beside $ref; but pattern with type counts, as if it began with ^ and ended with $
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xgrammar==0.2.8 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import xgrammar

vocabulary = [bytes([n]) for n in range(256)] + [b"</s>"]
compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]))
reference = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}, "minimum": 5}
seen = []
for schema, text in (
    ({"minimum": 5}, "1"),
    ({"type": "integer", "minimum": 5}, "1"),
    ({"minLength": 2}, '"a"'),
    ({"required": ["a"]}, "{}"),
    (reference, "1"),
    ({"type": "string", "pattern": "a"}, '"bab"'),
):
    follows = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps(schema), strict_mode=False))
    seen.append(all(follows.accept_token(byte) for byte in text.encode()) and follows.accept_token(256))
    print(version("xgrammar"), json.dumps(schema), "takes" if seen[-1] else "refuses", text)
raise SystemExit(seen != [True, False, True, True, True, False])
PYTHON
