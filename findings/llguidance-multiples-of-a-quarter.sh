#!/bin/sh
# llguidance 1.9.1: multiples of 0.25, and of 0.125 and 0.75
# Guess: every decimal text of a multiple is taken, as 0.1 is for 0.05
# Seen: 0.25, 0.50 and 1 are, but not 0.5 and 1.5: where a step has as many fives as that, zeros at the end may not be left out
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
from decimal import Decimal
from importlib.metadata import version

from llguidance import LLMatcher, LLTokenizer

tokenizer, seen = LLTokenizer("byte"), {}
for step in ("0.05", "0.2", "0.5", "0.25", "0.75", "0.125"):
    schema = {"type": "number", "multipleOf": float(step)}
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
    short = [format((Decimal(step) * n).normalize(), "f") for n in range(12)]
    refused = []
    for text in short:
        tried, tokens = matcher.deep_copy(), tokenizer.tokenize_str(text)
        if tried.try_consume_tokens(tokens) != len(tokens) or not tried.is_accepting():
            refused.append(text)
    seen[step] = bool(refused)
    print(version("llguidance"), "multipleOf", step, "refuses", refused)
raise SystemExit(seen != {"0.05": False, "0.2": False, "0.5": False, "0.25": True, "0.75": True, "0.125": True})
PYTHON
