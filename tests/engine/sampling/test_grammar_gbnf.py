"""GBNF means what it means to llama.cpp (xllamacpp 2026.10.11549 was asked)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvserve.engine.sampling import grammar_gbnf
from tests.grammars import gbnf_takes


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ("root ::= . .*", ["\n", "a\n\n", "é"], [""]),
        ('root ::= "a" .{2} "b"', ["a\n\nb"], ["ab"]),
        (r'root ::= "\u0041\u00e9\U0001F600"', ["Aé\U0001f600"], ["A"]),
        (r"root ::= [\u00e9\u0041-\u0043]", ["é", "B"], ["D", "u"]),
        (r'root ::= "\u000a\u0022\u005c"', ['\n"\\'], []),
        (r"root ::= [\u005d\u002d\u005ca]", ["]", "-", "\\", "a"], ["b"]),
        (r'root ::= "\[a\]" [\[\]]', ["[a][", "[a]]"], ["a["]),
        ("root ::= [a&&b] [c~~d]", ["a~", "&d"], ["ac~"]),
        (r'root ::= "\\u0041" "\n" "\x41"', ["\\u0041\nA"], ["A\nA"]),
        ('root ::= start "b"\nstart ::= "a" start-?\nstart- ::= "c"', ["ab", "acb"], ["b"]),
        ('root ::= "." [.] "start" "#" # a . in a start\n', ["..start#"], ["\n.start#"]),
        ('root ::= "a"{0} ("b" [c] ("d")) { 0, 0 } x{0} "e"\nx ::= "x"', ["e"], ["ae", "bcde"]),
        ('root ::= ("a"+ # it\n {0} "b"{1,2}{0} "e")', ["e"], ["ae", "aae", "be"]),
        ('root ::= "a"{0,1} "b"{2} "{0}"', ["bb{0}", "abb{0}"], ["b{0}"]),
        ('root ::= "[\\u005b]"', ["[[]"], []),
    ],
)
def test_gbnf_is_read_as_llama_cpp_reads_it(
    grammar: str, right: Sequence[str], wrong: Sequence[str]
) -> None:
    assert [text for text in right if not gbnf_takes(grammar, text)] == []
    assert [text for text in wrong if gbnf_takes(grammar, text)] == []


def test_what_is_no_character_stays_an_error() -> None:
    with pytest.raises(AssertionError):
        gbnf_takes(r'root ::= "\ud800"', "a")


@pytest.mark.parametrize("text", ["[" * 1000, "{" * 1000, '"\\' * 1000 + "n"])
def test_what_nothing_closes_is_read_once(text: str) -> None:
    """It was read from each of its characters on: hours for a grammar of a megabyte."""
    assert grammar_gbnf._TOKENS.findall(text) == [text] and grammar_gbnf.plain_gbnf(text) == text
