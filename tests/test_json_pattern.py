"""Patterns are ECMAScript's: what llguidance takes under them, with its tokenizer of bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvserve.json_schema import schema_text
from kvserve.log import RequestError
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


COLOURS = {"enum": ["red", "a.b", 'q"', "é ä", "a\nb", 1], "title": "Colour"}


@pytest.mark.parametrize("names", [COLOURS, {"$ref": "#/$defs/Colour"}])
def test_names_of_an_enum_are_kept(names: dict[str, Any]) -> None:
    """As pydantic 2.14 writes ``dict[Colour, int]``; llguidance 1.9.1 refuses propertyNames."""
    schema = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "integer"},
        "$defs": {"Colour": COLOURS},
    }
    for right in (
        "{}",
        '{"red": 1}',
        '{"a.b": 1, "red": 2}',
        '{"q\\"": 1}',
        '{"é ä": 1, "a\\nb": 2}',
    ):
        assert takes(schema, right), right
    for wrong in ('{"blue": 1}', '{"axb": 1}', '{"red": "x"}', '{"1": 1}', '{"redd": 1}'):
        assert not takes(schema, wrong), wrong


def test_names_go_with_properties_and_patterns() -> None:
    names = {"enum": ["a", "b"]}
    properties = {"a": {"type": "string"}, "c": {}}
    schema = {"type": "object", "propertyNames": names, "properties": properties}
    assert takes(schema, '{"a": "x", "b": 1}')
    assert not takes(schema, '{"a": 1}')
    assert not takes(schema, '{"c": 1}')
    assert not takes({**schema, "properties": {"a": {}, "b": {}}}, '{"": 1}')
    closed = {**schema, "additionalProperties": False}
    assert takes(closed, '{"a": "x"}')
    assert not takes(closed, '{"b": 1}')
    pattern = {"type": "object", "propertyNames": {"type": "string", "pattern": "^x[^[]$"}}
    assert takes(pattern, '{"xy": [1]}')
    assert not takes(pattern, '{"x[": 1}')
    record = {**schema, "propertyNames": {"type": "string"}}  # zod 4.6 writes it for any record
    assert takes(record, '{"a": "x", "d": 1}')
    assert not takes(record, '{"a": 1}')


@pytest.mark.parametrize("names", [{"minLength": 2}, {"$ref": "#/nowhere"}, {"enum": "a"}, False])
def test_other_rules_of_names_are_refused(names: object) -> None:
    with pytest.raises(AssertionError, match="propertyNames"):
        takes({"type": "object", "propertyNames": names}, "{}")


@pytest.mark.parametrize("names", [{"enum": ["name"] * 1000}, {"pattern": "a" * 4000}])
def test_names_behind_references_are_counted(names: object) -> None:
    """Kind: a schema that grows where it is read: 3,000 references to 3,000 names took 48 s."""
    object_ = {"type": "object", "propertyNames": {"$ref": "#/$defs/names"}}
    with pytest.raises(RequestError, match="propertyNames of more than 131072 characters"):
        schema_text({"anyOf": [object_] * 1000, "$defs": {"names": names}}, "schema", "f")
