#!/bin/sh
# llguidance 1.9.1: bounds of int64 and beyond are refused, and a lower bound from 10^18 on
# Guess: bounds that fit 64 bits compile
# Seen: Failed to generate regex for integer range (or float range); 10^17 and 2^63 - 1 as a maximum compile
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
def refusal(schema):
    try:
        accepts(schema, "0")
    except ValueError as error:
        return str(error)[:120]
    return ""


seen = []
for schema in (
    {"type": "integer", "minimum": 10**18},
    {"type": "integer", "minimum": -(2**63), "maximum": 0},
    {"type": "number", "minimum": -1e20, "maximum": 1e20},
    {"type": "number", "minimum": 9e18},
    {"type": "integer", "minimum": 10**17},
    {"type": "integer", "maximum": 2**63 - 1},
):
    seen.append(refusal(schema))
    print(schema, "->", seen[-1] or "compiled")
raise SystemExit([bool(text) for text in seen] != [True] * 4 + [False] * 2)
PYTHON
