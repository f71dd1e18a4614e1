#!/bin/sh
# xgrammar 0.2.9 (torch 2.13.0): compile_regex, beside Python's re.fullmatch
# Guess: the regular expressions of Python, or of JavaScript, or an error for what it does not know
# Seen: of neither: a dot takes a line end, so `.*` does not end with the line; \d and \w are ASCII and \s is not; a class that begins with ^] is JavaScript's; \A and \Z are the letters A and Z, which a warning says. Look-aheads, back-references, word boundaries, (?i), (?P<name>) and {,2} are errors
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xgrammar==0.2.9 torch==2.13.0
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import re
from importlib.metadata import version

import xgrammar

compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([bytes([n]) for n in range(256)] + [b"</s>"], stop_token_ids=[256]))


def takes(pattern, text):
    try:
        matcher = xgrammar.GrammarMatcher(compiler.compile_regex(pattern))
    except RuntimeError:
        return "?"
    return "-+"[all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)]


cases = {
    ("a.b", "a\nb"): "+-", ("a.b", "axb"): "++", (r"\d", "\u0663"): "-+", (r"\w", "\u00e9"): "-+", (r"\W", "\u00e9"): "+-", (r"\s", "\u00a0"): "++",
    (r"\Aab\Z", "ab"): "-+", (r"\Aab\Z", "AabZ"): "+-", ("[^]a]", "b"): "-+", ("(?=a)a", "a"): "?+", (r"(a)\1", "aa"): "?+", (r"\bab", "ab"): "?+",
    ("(?i)ab", "AB"): "?+", ("(?P<n>a)", "a"): "?+", ("a{,2}", "a"): "?+", ("a{1,2}", "a"): "++",
}
seen = {(pattern, text): takes(pattern, text) + "-+"[bool(re.fullmatch(pattern, text))] for pattern, text in cases}
print("xgrammar", version("xgrammar"), "and Python's re: taken (+), refused (-), error (?):", seen)
raise SystemExit(seen != cases)
PYTHON
