#!/bin/sh
# xgrammar 0.2.8: strings with a length, a pattern or a format in a JSON schema
# Guess: they are rules about the string's value, whose text may still be escaped, and is JSON
# Seen: under minLength or maxLength nothing can be escaped, so no quote or line end can be written, and a bare tab is taken, which is no JSON; a pattern is read against the text, so ^a"b$ asks for "a"b"; it is anchored though it does not say so; a look-ahead in it, and a length beside it or beside a format, are dropped, with a warning in the log
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


def takes(schema, text):
    follows = xgrammar.GrammarMatcher(compiler.compile_json_schema(json.dumps({"type": "string", **schema})))
    return all(follows.accept_token(byte) for byte in text.encode()) and follows.accept_token(256)


cases = [
    ({}, r'"say \"a\"\n"', True),
    ({"maxLength": 99}, r'"say \"a\"\n"', False),
    ({"maxLength": 99}, '"a\tb"', True),
    ({"pattern": '^a"b$'}, r'"a\"b"', False),
    ({"pattern": '^a"b$'}, '"a"b"', True),
    ({"pattern": "b"}, '"abc"', False),
    ({"pattern": "^(?!a).*$"}, '"abc"', True),
    ({"pattern": "^a+$", "maxLength": 2}, '"aaa"', True),
    ({"format": "date", "maxLength": 2}, '"2026-11-29"', True),
]
seen = [takes(schema, text) for schema, text, _ in cases]
for (schema, text, _), taken in zip(cases, seen, strict=True):
    print(version("xgrammar"), schema, repr(text), taken)
raise SystemExit(seen != [wanted for _, _, wanted in cases])
PYTHON
