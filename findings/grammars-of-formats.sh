#!/bin/sh
# xgrammar 0.2.9 (torch 2.13.0), llguidance 1.9.1, outlines-core 0.2.14: `format` of a string
# Guess: the three take the same dates, times and addresses, those of the RFCs
# Seen: xgrammar takes 30 February and refuses the mail address a@b.c; outlines-core takes both, takes a date-time and a time without a zone, which RFC 3339 has to have, and refuses one with an offset, a fraction of a time, a UUID in capitals and a URL with a query of two fields; llguidance refuses 30 February (29 February of any year is taken), takes the others, and refuses an IPv6 address that ends in IPv4's form, as xgrammar does not
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xgrammar==0.2.9 torch==2.13.0 llguidance==1.9.1 outlines-core==0.2.14 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import json
import re
from importlib.metadata import version

import llguidance
import xgrammar
from outlines_core.json_schema import build_regex_from_schema


class Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, [256]
    tokens = [bytes([n]) for n in range(256)] + [b"</s>"]

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(Bytes.tokens, stop_token_ids=[256]))
tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()))


def takes(schema, text):
    first = xgrammar.GrammarMatcher(compiler.compile_json_schema(schema))
    second = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
    try:
        third = "+" if re.fullmatch(build_regex_from_schema(schema), text) else "-"
    except ValueError:
        third = "?"
    one = all(first.accept_token(byte) for byte in text.encode()) and first.accept_token(256)
    other = all(second.consume_token(byte) for byte in text.encode()) and second.is_accepting()
    return "-+"[one] + "-+"[other] + third


cases = {
    ("date", "2024-02-30"): "+-+", ("date", "2023-02-29"): "+++", ("date-time", "2024-02-28T10:00:00+01:00"): "++-",
    ("date-time", "2024-02-28T10:00:00"): "--+", ("date-time", "2024-02-28t10:00:00z"): "-+-", ("time", "10:00:00"): "--+",
    ("time", "10:00:00.5Z"): "++-", ("uuid", "123E4567-E89B-12D3-A456-426614174000"): "++-", ("email", "a@b.c"): "-++",
    ("email", "user@example.com"): "+++", ("uri", "http://a.b/c?d=e&f"): "++-", ("ipv6", "::ffff:1.2.3.4"): "+-?",
}
seen = {(kind, text): takes(json.dumps({"type": "string", "format": kind}), f'"{text}"') for kind, text in cases}
print("xgrammar", version("xgrammar"), "llguidance", version("llguidance"), "outlines-core", version("outlines-core"), "taken (+), refused (-), unknown (?):", seen)
raise SystemExit(seen != cases)
PYTHON
