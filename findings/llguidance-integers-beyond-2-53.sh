#!/bin/sh
# llguidance 1.9.1: constants and bounds beyond 2^53 are read as 64-bit floats
# Guess: a const of a JSON schema keeps its digits, and a bound is exact
# Seen: another number is forced; const 1.5e300 has to be written out with 301 digits
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def accepts(schema, text):
    """Whether the grammar of a schema takes each byte of a text, and may end behind it."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


print("llguidance", version("llguidance"))
seen = [
    accepts({"const": 123456789012345678}, "123456789012345678"),
    accepts({"const": 123456789012345678}, "123456789012345680"),
    accepts({"type": "integer", "minimum": 2**53 + 1}, str(2**53)),
    accepts({"type": "integer", "exclusiveMinimum": 2**53}, str(2**53)),
    accepts({"const": 1.5e300}, "1.5e300"),
    accepts({"const": 1.5e300}, "15" + "0" * 299),
]
print("takes 123456789012345678, ...680; 2^53 above 2^53 + 1, and above itself; 1.5e300, its 301 digits:", seen)
raise SystemExit(seen != [False, True, True, True, False, True])
PYTHON
