#!/bin/sh
# llguidance 1.9.1, lark 1.3.1: grammars in Lark's syntax whose expressions overlap
# Guess: an Earley parser takes every text of the grammar: /[a-z]+/ "end" takes wordend, as the expression /[a-z]+end/ does
# Seen: an expression takes as much as it can and gives nothing back: /[a-z]+/ "end" takes no text at all, /a+/ /a+/ not aa, x x with x: /a{1,2}/ aaa and not aa, "<b>" /(.|\n)*/ "</b>" nothing; `+?` changes nothing, where Lark's is lazy. What takes them: one expression or one terminal, `x[lazy]`, or rules of strings. docs/syntax.md of llguidance says so in a clause: "an equivalent of lexer='dynamic'" of Lark, which does the same; its dynamic_complete takes all
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q llguidance==1.9.1 lark==1.3.1
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version

from lark import Lark
from lark.exceptions import LarkError
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def takes(grammar, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def lark_takes(grammar, text, lexer):
    try:
        Lark(grammar, parser="earley", lexer=lexer).parse(text)
    except LarkError:
        return False
    return True


cases = [
    ('start: /[a-z]+/ "end"', "wordend"), ("start: /a+/ /a+/", "aa"), ("start: x x\nx: /a{1,2}/", "aaa"), ("start: x x\nx: /a{1,2}/", "aa"),
    (r'start: "<b>" /(.|\n)*/ "</b>"', "<b>x</b>"), ('start: /a+?/ "ab"', "aab"),
    ("start: /[a-z]+end/", "wordend"), ('start: X\nX: /[a-z]+/ "end"', "wordend"), ('start: x x\nx: "a"~1..2', "aa"),
]
seen = [takes(*case) for case in cases] + [takes('start: x "ab"\nx[lazy]: /a+/', "aab")]
lexers = [[lark_takes(*case, lexer) for case in cases[:4]] for lexer in ("dynamic", "dynamic_complete")]
for case, taken in zip(cases, seen):
    print(*map(repr, case), taken)
print("llguidance", version("llguidance"), seen, "| Lark", version("lark"), "dynamic and dynamic_complete, the first four:", lexers)
same = [False, False, True, False]
raise SystemExit(seen != [*same, False, False, True, True, True, True] or lexers != [same, [True] * 4])
PYTHON
