#!/bin/sh
# llguidance 1.9.1: zeros at the end of a number that has bounds
# Guess: 0.30 is taken wherever 0.3 is, and 1e0 wherever 1 is
# Seen: under minimum 0.1 and maximum 0.3, 0.10 and 0.100 are taken, 0.30 is not; a bound of either kind forbids exponents, which a number without bounds may have
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


def takes(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


between = {"type": "number", "minimum": 0.1, "maximum": 0.3}
seen = {text: takes(between, text) for text in ("0.1", "0.10", "0.100", "0.3", "0.30", "0.2e0")}
free = {text: takes({"type": "number"}, text) for text in ("0.30", "0.2e0")}
print(version("llguidance"), "between 0.1 and 0.3:", seen, "without bounds:", free)
raise SystemExit(list(seen.values()) != [True, True, True, True, False, False] or not all(free.values()))
PYTHON
