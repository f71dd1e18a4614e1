#!/bin/sh
# tokenizers 0.23.3 and regex 2026.11.19: the same class in a pre-tokenizer's pattern
# Guess: equal sets of characters, for \h and \w too
# Seen: \h is a hexadecimal digit in tokenizers and white space in regex; \w has the powers (U+00B2) in tokenizers alone; \p{L} differs in over a thousand letters of newer Unicode
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q tokenizers==0.23.3 regex==2026.11.19
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

import regex
from tokenizers import Regex, pre_tokenizers

every = "".join(chr(n) for n in range(0x30000) if not 0xD800 <= n < 0xE000)
seen = {}
for kind in (r"\h", r"\w", r"\p{L}", r"\s"):
    spans = pre_tokenizers.Split(Regex(kind + "+"), "removed", invert=True).pre_tokenize_str(every)
    one = {c for _, (start, end) in spans for c in every[start:end]}
    other = set(regex.findall(kind, every))
    seen[kind] = len(one - other), len(other - one)
    print(kind, "tokenizers", len(one), "regex", len(other), "in one alone", seen[kind], [hex(ord(c)) for c in sorted(one ^ other)[:6]])
print(version("tokenizers"), version("regex"))
powers = {"\u00b2", "\u00b3", "\u00b9"}
hexadecimal = seen[r"\h"] == (22, 18)
raise SystemExit(not (hexadecimal and seen[r"\w"][0] and seen[r"\p{L}"][1] > 1000 and seen[r"\s"] == (0, 0)))
PYTHON
