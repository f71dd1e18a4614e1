#!/bin/sh
# jsonschema 4.26.0, pydantic 2.14.4 and llguidance 1.9.1: 19.99 as a multiple of 0.01
# Guess: it is one for all three: validators allow for binary fractions, as they allow 0.3 for 0.1
# Seen: jsonschema refuses 19.99 (and takes 0.3 for 0.1 no more), pydantic takes it, llguidance counts in decimals; so an answer that a grammar forced may fail its own schema
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q jsonschema==4.26.0 pydantic==2.14.4 llguidance==1.9.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

import jsonschema
from llguidance import LLMatcher, LLTokenizer
from pydantic import Field, TypeAdapter, ValidationError
from typing import Annotated

tokenizer, seen = LLTokenizer("byte"), []
for text, factor in (("19.99", 0.01), ("0.3", 0.1), ("4.35", 0.01), ("0.25", 0.25)):
    schema, value = {"type": "number", "multipleOf": factor}, float(text)
    try:
        TypeAdapter(Annotated[float, Field(multiple_of=factor)]).validate_python(value)
        by_pydantic = True
    except ValidationError:
        by_pydantic = False
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    tokens = tokenizer.tokenize_str(text)
    forced = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    seen.append([jsonschema.Draft202012Validator(schema).is_valid(value), by_pydantic, forced])
    print(text, "of", factor, "jsonschema, pydantic, llguidance:", seen[-1])
print(version("jsonschema"), version("pydantic"), version("llguidance"))
raise SystemExit(seen != [[False, True, True], [False, True, True], [False, True, True], [True, True, True]])
PYTHON
