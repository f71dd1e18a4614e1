#!/bin/sh
# llguidance 1.9.1: patterns of JSON schemas, which JSON Schema takes from ECMAScript
# Guess: read as ECMAScript or Python read them, or refused where they cannot be
# Seen: read as Rust's regex: && and ~~ in a class are set operations, so ^[a&&b]$ has no match and ^[a~~b]$ refuses ~; ^[^[]$, ^{a}$ and a surrogate pair are errors. And \d is ten digits in a pattern, but those of all scripts in a grammar that is a regex
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def takes(grammar, text):
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    if matcher.is_error():
        return "error"
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


seen = []
for pattern, text in (
    ("^[a&&b]$", "a"), ("^[a~~b]$", "~"), ("^[^[]$", "a"), ("^{a}$", "{a}"), ("^\\ud83d\\ude00$", "\U0001f600"), ("^\\d$", "\u0663"),
):
    schema = {"type": "string", "pattern": pattern}
    seen.append(takes(LLMatcher.grammar_from_json_schema(json.dumps(schema)), f'"{text}"'))
    print(version("llguidance"), "pattern", pattern, ascii(text), seen[-1])
digit = takes(LLMatcher.grammar_from_regex("\\d"), "\u0663")
print("regex \\d", ascii("\u0663"), digit)
raise SystemExit(seen != ["error", False, "error", "error", "error", False] or digit is not True)
PYTHON
