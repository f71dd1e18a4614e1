#!/bin/sh
# pydantic 2.14.4: the JSON schema of dict[Literal["a", "b"], int], under llguidance 1.9.1 and xgrammar 0.2.8
# Guess: two properties, or an object with any names; every grammar library takes it
# Seen: propertyNames with an enum, which llguidance refuses as unimplemented and xgrammar enforces; a dict of int keys has no word about its names, so {"a": 1} passes the schema and fails the type
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q pydantic==2.14.4 jsonschema==4.26.0 llguidance==1.9.1 xgrammar==0.2.8 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version
from typing import Literal

import jsonschema
import xgrammar
from llguidance import LLMatcher, LLTokenizer
from pydantic import TypeAdapter, ValidationError

named, counted = TypeAdapter(dict[Literal["a", "b"], int]), TypeAdapter(dict[int, int])
schema = named.json_schema()
matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
refusal = matcher.get_error().split("<state>")[0].strip()[:80] if matcher.is_error() else ""
info = xgrammar.TokenizerInfo([bytes([n]) for n in range(256)] + [b"</s>"], stop_token_ids=[256])
compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
taken = []
for text in ('{"a": 1}', '{"c": 1}'):
    follows = xgrammar.GrammarMatcher(compiled)
    taken.append(all(follows.accept_token(byte) for byte in text.encode()) and follows.accept_token(256))
passes = jsonschema.Draft202012Validator(counted.json_schema()).is_valid({"a": 1})
try:
    counted.validate_python({"a": 1})
    fails = False
except ValidationError:
    fails = True
print(version("pydantic"), schema, "| llguidance:", refusal, "| xgrammar takes a, c:", taken)
print(counted.json_schema(), "valid by schema:", passes, "refused by type:", fails)
raise SystemExit("propertyNames" not in schema or "propertyNames" not in refusal or taken != [True, False] or not (passes and fails))
PYTHON
