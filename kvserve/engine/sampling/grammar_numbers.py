"""JSON schemas with numbers that llguidance cannot hold, as Lark with these numbers as text.

It reads numbers as float64, and writes them out without an exponent: 2^53 + 1 becomes 2^53, and
1.5e300 gets 300 digits. So what has such numbers is written here, and all else is left to it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from decimal import Decimal
from typing import Any

from kvserve.json_schema import COMPACT, each_schema, named

_MOST = 2**53
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_NUMBER = {*_BOUNDS, "multipleOf"}
_ARRAY = {"items", "prefixItems", "minItems", "maxItems"}
_OBJECT = {"properties", "required", "additionalProperties"}
_OF = {"integer": _NUMBER, "number": _NUMBER, "array": _ARRAY, "object": _OBJECT}
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_CONTAINERS = "array", "object"
_SILENT = {"$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"}
_SILENT |= {"description", "example", "examples", "readOnly", "title", "writeOnly", "x-guidance"}
_KEY = r'/"[^"\\\x00-\x1f\x7f]*"/'
_ANY = "(0|[1-9][0-9]*)"


def exact_grammar(schema: Any) -> str | None:
    """Lark for a schema that has such numbers; ``None`` for any other. ``ValueError`` says what of
    it cannot be written."""
    writer = _Writer(schema)
    if not any(map(_has_beyond, _nodes(schema, ()))) or not writer.needs(schema):
        return None
    start = writer.expression(schema)
    rules = (f"{name}: {body}" for name, body in writer.rules.items())
    return "\n".join((f"start: {start}", *rules))


class _Writer:
    def __init__(self, root: Any) -> None:
        self.rules: dict[str, str] = {}
        self._root = root
        self._references: dict[str, str] = {}
        self._needing: dict[int, tuple[Any, bool]] = {}
        """By a schema's place in memory, which it keeps as long as it is here."""

    def needs(self, schema: Any) -> bool:
        """Whether a number in it, or behind its references, has to be text."""
        if id(schema) not in self._needing:
            self._needing[id(schema)] = schema, False  # while it is being read
            found = any(
                _has_beyond(node) or ("$ref" in node and self.needs(self._target(node["$ref"])))
                for node in _nodes(schema)
            )
            self._needing[id(schema)] = schema, found
        return self._needing[id(schema)][1]

    def expression(self, schema: Any) -> str:
        if not self.needs(schema):
            return self._plain(schema)
        node = {key: value for key, value in schema.items() if key not in _SILENT}
        if "allOf" in node:
            return self.expression(self._merged([*node.pop("allOf"), node]))
        if node.keys() == {"$ref"}:
            return self._reference(node["$ref"])
        for key in ("anyOf", "oneOf"):
            if node.keys() == {key}:
                return _either([self.expression(option) for option in node[key]])
        values = [node.pop("const")] if "const" in node else node.pop("enum", None)
        kinds = node.pop("type", _TYPES)
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        if values is not None:
            self._refuse(node.keys() - set(_BOUNDS))
            valid = [v for v in values if _is_of(v, kinds) and _is_within(v, node)]
            return self._values(valid, schema)
        self._refuse(node.keys() - _NUMBER - _ARRAY - _OBJECT - {"pattern", "format"})
        return _either([self._of_type(kind, node) for kind in kinds])

    def _refuse(self, keywords: Any) -> None:
        if keywords:
            raise ValueError(
                f"{min(keywords)} cannot be enforced beside numbers that 64-bit floats do not hold "
                "or that need an exponent; leave one of them out and check the answer"
            )

    def _merged(self, parts: list[Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in parts:
            if not isinstance(part, dict) or merged.keys() & part.keys() - _SILENT:
                self._refuse(["allOf"])
            merged |= part
        return merged

    def _plain(self, schema: Any) -> str:
        """What llguidance reads by itself."""
        if any(not _is_definition(node["$ref"]) for node in _nodes(schema) if "$ref" in node):
            self._refuse(["$ref"])
        schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
        shared = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
        return "%json " + json.dumps({**schema, **shared, "x-guidance": COMPACT})

    def _target(self, reference: Any) -> Any:
        found = named(self._root, reference) if isinstance(reference, str) else None
        return {} if found is None else found  # the library says what is wrong with it

    def _reference(self, reference: str) -> str:
        if reference not in self._references:
            self._references[reference] = f"r{len(self._references)}"
            self.rules[self._references[reference]] = self.expression(self._target(reference))
        return self._references[reference]

    def _terminal(self, body: str) -> str:
        name = f"N{len(self.rules)}"
        self.rules[name] = body
        return name

    def _values(self, values: list[Any], schema: Any) -> str:
        held = [value for value in values if not _is_beyond(value)]
        texts = {text for value in values if _is_beyond(value) for text in _texts(value)}
        if not values:
            raise ValueError(
                f"no value of {json.dumps(schema)[:100]} is of its type and within its bounds"
            )
        return _either([self._plain({"enum": held})] * bool(held) + sorted(map(_quoted, texts)))

    def _of_type(self, kind: str, node: Mapping[str, Any]) -> str:
        others = {key for keys in _OF.values() for key in keys}
        own = _OF.get(kind, node.keys() - others)
        node = {"type": kind, **{key: value for key, value in node.items() if key in own}}
        if not self.needs(node):
            return self._plain(node)
        if kind == "object":
            return self._object(node)
        if kind == "array":
            return self._array(node)
        self._refuse(node.keys() & {"multipleOf"})
        return self._terminal(_range(node))

    def _object(self, node: Mapping[str, Any]) -> str:
        """In the order of its properties; those that it does not name come last."""
        properties, required = node.get("properties", {}), node.get("required", ())
        others = node.get("additionalProperties", True)
        if missing := sorted(set(required) - properties.keys()):
            self._refuse([f"required {missing[0]}"])
        first = later = '"}"'  # what follows, before any property and behind one
        if others is not False:
            names = "|".join(map(_pattern, map(_json, properties)))
            key = self._terminal(_KEY + f" & ~/{names}/" * bool(names))
            pair = f"o{len(self.rules)}"
            self.rules[pair] = ""  # the name is taken
            self.rules[pair] = f'{key} ": " {self.expression(others)}'
            later = f'(", " {pair})* "}}"'
            first = f'("}}" | {pair} {later})'
        for name, schema in reversed(properties.items()):
            rule = f"o{len(self.rules)}"
            self.rules[rule] = ""
            self.rules[rule] = f"{_quoted(_json(name) + ': ')} {self.expression(schema)} {later}"
            one, another = rule, f'", " {rule}'
            if name not in required:
                one, another = f"({one} | {first})", f"({another} | {later})"
            first = one
            later = f"o{len(self.rules)}"
            self.rules[later] = another
        return f'"{{" {first}'

    def _array(self, node: Mapping[str, Any]) -> str:
        prefix, items = node.get("prefixItems", ()), node.get("items", True)
        if isinstance(items, list):
            self._refuse(["items as a list"])
        each = [self.expression(schema) for schema in prefix]
        least, most = int(node.get("minItems", 0)), node.get("maxItems")
        most = most if most is None else int(most)
        body = ""
        if items is not False and (most is None or most > len(each)):
            rule = f"a{len(self.rules)}"
            self.rules[rule] = ""
            self.rules[rule] = self.expression(items)
            one = not each  # of these has no comma before it
            low, high = max(least - len(each), 0), None if most is None else most - len(each)
            times = f"{max(low - one, 0)},{'' if high is None else high - one}"
            body = f"{rule} " * one + f'(", " {rule}){{{times}}}' * (times != "0,0")
            body = f"({body})?" if one and not low else body
        for place in reversed(range(len(each) if most is None else min(len(each), most))):
            body = ('", " ' if place else "") + f"{each[place]} {body}"
            body = body if place < least else f"({body})?"
        return f'"[" {body} "]"'


def _nodes(schema: Any, without: Collection[str] = _SILENT) -> Iterator[dict[str, Any]]:
    """The schemas within one, itself included, but for its definitions."""
    found: list[dict[str, Any]] = []

    def look(node: dict[str, Any]) -> dict[str, Any]:
        found.append(node)
        return {key: value for key, value in node.items() if key not in without}

    each_schema(schema, look)
    return iter(found)


def _has_beyond(node: Mapping[str, Any]) -> bool:
    if any(_is_beyond(node[key]) for key in ("const", "enum") if key in node):
        return True
    # The library cuts an upper bound to this, so it holds it.
    held = "maximum" if node.get("type") == "integer" else ""
    return any(
        _is_beyond(node[key]) and not (key == held and node[key] == 2**63 - 1)
        for key in _BOUNDS
        if key in node
    )


def _is_beyond(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(map(_is_beyond, value.values() if isinstance(value, dict) else value))
    if isinstance(value, float):
        return "e" in repr(value) or abs(value) >= _MOST
    return isinstance(value, int) and abs(value) >= _MOST


def _is_of(value: Any, kinds: list[str]) -> bool:
    if isinstance(value, bool) or value is None:
        return ("null" if value is None else "boolean") in kinds
    if isinstance(value, int | float):
        return "number" in kinds or ("integer" in kinds and value == int(value))
    return ("string" if isinstance(value, str) else _CONTAINERS[isinstance(value, dict)]) in kinds


def _is_within(value: Any, node: Mapping[str, Any]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    inf = float("inf")
    return bool(
        node.get("minimum", -inf) <= value <= node.get("maximum", inf)
        and node.get("exclusiveMinimum", -inf) < value < node.get("exclusiveMaximum", inf)
    )


def _is_definition(reference: Any) -> bool:
    return isinstance(reference, str) and reference.startswith(("#/$defs/", "#/definitions/"))


def _texts(value: Any) -> list[str]:
    """How a value may be written."""
    text = _json(value)
    return [text, text.replace("e+", "e")] if isinstance(value, float) else [text]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression of Lark that matches this alone."""
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text).replace("\x7f", r"\u007f")


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


# ---- ranges -------------------------------------------------------------------------------------


def _range(node: Mapping[str, Any]) -> str:
    """A terminal: the numbers without exponent that are within all bounds."""
    whole = node["type"] == "integer"
    parts = [f"/-?{_ANY}{'' if whole else _FRACTION}/"]
    for name in _BOUNDS:
        if name in node:
            strict, upper = name.startswith("exclusive"), name.lower().endswith("maximum")
            parts.append(f"/{_bound(Decimal(repr(node[name])), strict, upper, whole)}/")
    return " & ".join(parts)


_FRACTION = r"(\.[0-9]+)?"


def _bound(bound: Decimal, strict: bool, upper: bool, whole: bool) -> str:
    """Numbers on the right side of it, and maybe others that are no numbers."""
    negative = bound < 0 or (bound == 0 and strict and upper)
    digits = _at_least if upper == negative else _at_most
    near = digits(*_split(bound.copy_abs()), strict, whole)
    far = f"{_ANY}{'' if whole else _FRACTION}"
    if negative:
        return f"-({near})" if upper else f"({far}|-({near}))"
    return f"(-{far}|{near})" if upper else near


def _split(number: Decimal) -> tuple[str, str]:
    """The digits in front of the point and behind it."""
    front, _, behind = f"{number:f}".partition(".")
    return front, behind.rstrip("0")


def _at_least(front: str, behind: str, strict: bool, whole: bool) -> str:
    count, rest = len(front), "" if whole else _FRACTION
    options = [f"[1-9][0-9]{{{count},}}{rest}"]
    for place, digit in enumerate(front):
        if digit != "9":
            head = f"{front[:place]}[{int(digit) + 1}-9]"
            options.append(f"{head}[0-9]{{{count - place - 1}}}{rest}")
    if whole:
        return "|".join(options + [front] * (not strict and not behind))
    more = [f"{behind[:n]}[{int(d) + 1}-9][0-9]*" for n, d in enumerate(behind) if d != "9"]
    more.append(f"{behind}[0-9]*[1-9][0-9]*" if strict else f"{behind}[0-9]*")
    options.append(rf"{front}\.({'|'.join(more)})")
    return "|".join(options + [front] * (not strict and not behind))


def _at_most(front: str, behind: str, strict: bool, whole: bool) -> str:
    count, rest = len(front), "" if whole else _FRACTION
    options = [f"(0|[1-9][0-9]{{0,{count - 2}}}){rest}"] if count > 1 else []
    for place, digit in enumerate(front):
        lowest = 1 if place == 0 and count > 1 else 0
        if int(digit) > lowest:
            head = f"{front[:place]}[{lowest}-{int(digit) - 1}]"
            options.append(f"{head}[0-9]{{{count - place - 1}}}{rest}")
    if behind or not strict:
        options.append(front)
    if not whole:
        less = [f"{behind[:n]}[0-{int(d) - 1}][0-9]*" for n, d in enumerate(behind) if d != "0"]
        less += [behind[:n] for n in range(1, len(behind))]
        less += [f"{behind}0*" if behind else "0+"] * (not strict)
        options += [rf"{front}\.({'|'.join(less)})"] * bool(less)
    return "|".join(options) or "[^0-9]"
