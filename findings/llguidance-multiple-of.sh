#!/bin/sh
# llguidance 1.9.1: multipleOf 0.07 has too many digits, 0 is no multiple of 2^32 - 1
# Guess: multipleOf 0.07 compiles as 0.01 does
# Seen: refused: has too many digits: 7000000000000001 (it is multiplied by ten as a float)
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


seen = [refusal({"type": "number", "multipleOf": factor}) for factor in (0.07, 0.01, 2**33)]
print("multipleOf 0.07, 0.01, 2^33:", seen)
zero = accepts({"type": "integer", "multipleOf": 2**32 - 1}, "0")
print("0 is a multiple of 2^32 - 1:", zero)
raise SystemExit([bool(text) for text in seen] != [True, False, True] or zero)
PYTHON
