"""Patterns are ECMAScript's: what llguidance takes under them, with its tokenizer of bytes."""

from __future__ import annotations

import json

import pytest

from tests.grammars import takes

LINES = ("\n", "\r", "\u2028", "\u2029")


def written(text: str) -> str:
    """JSON text of a string, its characters as they are."""
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        # A class has no sets in it (ECMA-262, 22.2.1): llguidance 1.9.1 reads && and ~~ as Rust.
        ("^[a&&b]$", "a&b", "c"),
        ("^[a~~b]$", "a~b", "-"),
        ("^[a-z&&[^b]]$", ["a]", "&]", "^]"], ["a", "]"]),
        ("^[[:a:]]$", ["a]", "[]"], "a:"),
        ("^[^[]$", "ab", "["),
        (r"^[^[\]]$", "ab", "[]"),
        ("^[+--]$", "+,-", "*."),
        ("^[--/]$", "-./", ",0"),
        (r"^[\w-.]$", "a-.", "/ "),
        (r"^[\d-x]$", "1-x", "y"),
        ("^[]$", [], "a]"),
        ("^[^]$", "a\n", []),
        (r"^[\b]$", "\b", "b"),
        # Braces that repeat nothing are characters.
        ("^{a}$", ["{a}"], ["a"]),
        (r"^\$\{\w+}$", ["${ab}"], ["ab"]),
        ("^a{,2}$", ["a{,2}"], ["aa"]),
        ("^a{2}b{1,}$", ["aab", "aabb"], ["ab"]),
        # Escapes, and the ends of lines.
        (r"^\ud83d\ude00$", "\U0001f600", "\U0001f601"),
        (r"^[\ud83d\ude00-\ud83d\ude02]$", "\U0001f601", "\U0001f603"),
        (r"^\u{1f600}\u0041$", ["\U0001f600A"], "A"),
        (r"^\cA\0$", ["\x01\x00"], "A"),
        (r"^\é$", "é", "e"),
        ("^.$", ["a", "é"], LINES),
        (r"^\/[.]\.\.$", ["/..."], ["/a.."]),
        ("^(a|b)+c?$", ["ab", "bc"], ["c"]),
    ],
)
def test_patterns_are_those_of_ecmascript(pattern: str, texts: str, others: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    if not texts:
        with pytest.raises(AssertionError, match="Unsatisfiable"):
            takes(schema, written("a"))
        return
    assert [text for text in texts if not takes(schema, written(text))] == []
    assert [text for text in others if takes(schema, written(text))] == []


def test_names_of_patterns_are_patterns() -> None:
    schema = {
        "type": "object",
        "patternProperties": {"^[^[]$": {"type": "integer"}},
        "additionalProperties": False,
    }
    assert takes(schema, '{"a": 1}')
    assert not takes(schema, '{"[": 1}')
    assert not takes(schema, '{"a": "b"}')


def test_a_class_that_nothing_closes_is_refused() -> None:
    with pytest.raises(AssertionError, match="unclosed"):
        takes({"type": "string", "pattern": "^[a$"}, written("a"))
