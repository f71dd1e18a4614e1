#!/bin/sh
# xgrammar 0.2.8: numbers that a JSON schema fixes or bounds
# Guess: const 0.1 is written 0.1; a bound changes the values, not the way that numbers are written; separators hold in a const too
# Seen: 0.1 has to be written 0.10000000000000001; a bounded number has no exponent and at most six decimals, so that minimum 1e-7 refuses 0.0000001; a const list has no space behind its comma, whatever the separators are
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


def matcher(schema):
    compiled = compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(", ", ": "))
    return xgrammar.GrammarMatcher(compiled)


def takes(schema, text):
    follows = matcher(schema)
    return all(follows.accept_token(byte) for byte in text.encode()) and follows.accept_token(256)


forced = [matcher({"const": value}).find_jump_forward_string() for value in (0.1, 0.5, 3.14, [1, 2])]
print(version("xgrammar"), "const 0.1, 0.5, 3.14, [1, 2]:", forced)
texts = "1e5", "0.1234567", "0.123456", "0.0000001"
bounds = {json.dumps(extra): [takes({"type": "number", **extra}, text) for text in texts] for extra in ({}, {"minimum": 0}, {"minimum": 1e-7})}
print(texts, bounds)
wanted = [[True] * 4, [False, False, True, False], [False, False, True, False]]
raise SystemExit(forced != ["0.10000000000000001", "0.5", "3.1400000000000001", "[1,2]"] or list(bounds.values()) != wanted)
PYTHON
