"""Arguments that a model writes as text get the type that the whole schema of their tool allows."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from kvserve.server.parsers.argument_types import ArgumentTypes

TEXT, NULL, INT, NUMBER = ({"type": kind} for kind in ("string", "null", "integer", "number"))
OPTIONAL = {"anyOf": [TEXT, NULL]}
COLOUR = {"$ref": "#/$defs/Colour"}
DEFS = {
    "Colour": {"enum": ["1", "red"]},
    "Path": {"allOf": [TEXT, {"minLength": 1}]},
    "Loop": {"$ref": "#/$defs/Loop"},
    "Tree": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/Tree"}}, INT]},
    "a/b": TEXT,
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # What a string may be is a string: MCP servers and pydantic write ``Optional[str]`` so.
        *((OPTIONAL, text, text) for text in ("1234567", "true", '{"a": 1}', "1e5", "[1]", " x ")),
        (OPTIONAL, "null", None),
        *(({"oneOf": [NULL, TEXT]}, text, text) for text in ("1", '{"a": 1}')),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": ["null", "string", "integer"]}, "5", "5"),
        ({"type": "string", "nullable": True}, "12", "12"),
        ({"allOf": [TEXT, {"description": "d"}]}, "12", "12"),
        ({"anyOf": [{"allOf": [TEXT]}, NULL]}, "12", "12"),
        (COLOUR, "1", "1"),
        ({"$ref": "#/$defs/Path"}, "12", "12"),
        ({"$ref": "#/$defs/Path", "description": "d"}, "12", "12"),
        ({"$ref": "#/$defs/a~1b"}, "12", "12"),
        ({"anyOf": [COLOUR, NULL]}, "1", "1"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"const": "7"}, "7", "7"),
        ({"const": "true"}, "true", "true"),
        # What it may not be is a value.
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"const": 7}, "7", 7),
        ({"enum": ["auto", 3, None, True]}, "null", None),
        ({"enum": ["auto", 3, None, True]}, "true", True),
        ({"enum": ["red"]}, "\nred\n", "red"),
        ({"anyOf": [{"enum": ["auto"], "type": "string"}, INT]}, "5", 5),
        ({"anyOf": [INT, NULL]}, "null", None),
        ({"anyOf": [INT, NULL]}, "None", None),
        ({"allOf": [{"anyOf": [INT, TEXT]}, INT]}, "5", 5),
        ({"type": "boolean"}, "True", True),
        ({"anyOf": [{"type": "boolean"}, NULL]}, "False", False),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"anyOf": [{"type": "array"}, NULL]}, "[1, 2]", [1, 2]),
        ({"$ref": "#/$defs/Tree"}, "[1, [2]]", [1, [2]]),
        # An integer has no point.
        *((INT, text, number) for text, number in (("140.0", 140), ("1e3", 1000), ("-0.0", 0))),
        ({"anyOf": [INT, NULL]}, "140.0", 140),
        ({"anyOf": [INT, NUMBER]}, "140.5", 140.5),
        (NUMBER, "140.0", 140.0),
        (NUMBER, "3", 3),
        # A schema that says nothing, or that nothing follows, leaves what is written.
        *((schema, "12", 12) for schema in ({}, {"description": "d"}, {"$ref": "#/$defs/Loop"})),
        ({"$ref": "#/$defs/None"}, "12", 12),
        ({"$ref": "other.json#/x"}, "12", 12),
        (INT, "many", "many"),
        ({"enum": ["a"]}, "b", "b"),
        ({"type": "string", "enum": ["a"]}, "12", "12"),
        (True, "12", 12),
    ],
)
def test_a_value_has_a_type_of_its_schema(schema: Any, text: str, value: Any) -> None:
    types = ArgumentTypes({"type": "object", "properties": {"x": schema}, "$defs": DEFS})
    read = types.read("x", text)
    assert read == value and type(read) is type(value)
    if "$ref" not in str(schema) and value not in ("many", "b", "12"):
        jsonschema.validate(read, schema)


@pytest.mark.parametrize(
    "parameters",
    [
        {"$ref": "#/$defs/P", "$defs": {"P": {"properties": {"x": TEXT}}}},
        {"allOf": [{"properties": {"y": INT}}, {"properties": {"x": TEXT}}]},
        {"anyOf": [{"properties": {"x": INT}}, {"properties": {"x": OPTIONAL}}]},
        {"properties": {"y": INT}, "additionalProperties": TEXT},
    ],
)
def test_an_argument_is_found_wherever_the_schema_has_it(parameters: Any) -> None:
    assert ArgumentTypes(parameters).read("x", "12") == "12"


def test_references_that_go_round_cost_little() -> None:
    """Kind: a schema of a client that never ends: each reference leads to two more."""
    twice = [{"$ref": "#/$defs/A"}] * 2
    schemas = [{key: twice} for key in ("anyOf", "allOf", "oneOf")]
    for schema in schemas:
        root = {"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": schema}, **schema}
        types = ArgumentTypes(root)
        assert types.names == {"x"} and types.read("x", "12") in (12, "12")
        assert types.read("y", "12") in (12, "12")
        assert types._left > -20_000
