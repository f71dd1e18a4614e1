"""The chart of deploy/helm as manifests: what its templates use of Helm's language, and no more.

Actions with trimming, ``if``/``else if``/``else``, ``range``, ``define``/``include``, variables,
fields and pipelines of the functions below. A template that uses anything else is an error here,
not a silent difference; ``make acceptance`` compares all of ``VALUE_SETS`` with Helm itself.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm"
RELEASE = {"Name": "llm", "Namespace": "models"}
_ACTION = re.compile(r"(?P<before>\s*\{\{-|\{\{)\s*(?P<code>.*?)\s*(?P<after>-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|:=|[()|,]|[^\s()|,]+')

Node = tuple[Any, ...]
Scope = dict[str, Any]
"""Variables by name; ``.`` is the dot and ``$`` what it was at first."""


def render(**changes: Any) -> list[dict[str, Any]]:
    """All objects of the chart, with ``changes`` merged into its values."""
    return [
        item
        for name, text in texts(**changes).items()
        if name.endswith(".yaml") and (item := yaml.safe_load(text))
    ]


def texts(**changes: Any) -> dict[str, str]:
    """Rendered templates by file."""
    values = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    context = {"Values": _as_json(values), "Release": RELEASE}
    defined: dict[str, list[Node]] = {}
    found = {}
    for path in sorted(CHART.glob("templates/*"), key=lambda path: path.suffix != ".tpl"):
        nodes = list(_parse(iter(_tokens(path.read_text())), defined))
        if path.suffix != ".tpl":
            found[path.name] = _Renderer(defined).text(nodes, {".": context, "$": context})
    return found


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        inner = values.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            value = _merged(inner, value)
        values[key] = value
    return values


def _as_json(value: Any) -> Any:
    """Numbers of a values file are floats to Helm, which prints large ones with an exponent."""
    if isinstance(value, dict):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# ---- the language -------------------------------------------------------------------------------


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """("text", ...) and ("action", ...), trimmed as the dashes say."""
    at, trim = 0, False
    for match in _ACTION.finditer(text):
        plain = text[at : match.start()]
        yield "text", plain.lstrip() if trim else plain
        if not match["code"].startswith("/*"):
            yield "action", match["code"]
        at, trim = match.end(), bool(match["after"])
    yield "text", text[at:].lstrip() if trim else text[at:]


def _parse(tokens: Iterator[tuple[str, str]], defined: dict[str, list[Node]]) -> Iterator[Node]:
    """Up to an ``else`` or ``end`` that nobody in front has opened; that comes last."""
    for kind, value in tokens:
        word, _, rest = value.partition(" ")
        if kind == "text":
            yield "text", value
        elif word == "if":
            yield _condition(rest, tokens, defined)
        elif word == "range":
            yield "range", rest, list(_parse(tokens, defined))[:-1]
        elif word == "define":
            defined[rest.strip('"')] = list(_parse(tokens, defined))[:-1]
        elif word in ("else", "end"):
            yield word, rest
            return
        else:
            yield "value", value


def _condition(
    test: str, tokens: Iterator[tuple[str, str]], defined: dict[str, list[Node]]
) -> Node:
    *then, (word, rest) = _parse(tokens, defined)
    if word == "end":
        return "if", test, then, []
    if rest:
        return "if", test, then, [_condition(rest.removeprefix("if "), tokens, defined)]
    return "if", test, then, list(_parse(tokens, defined))[:-1]


class _Renderer:
    def __init__(self, defined: dict[str, list[Node]]) -> None:
        self._defined = defined

    def text(self, nodes: list[Node], scope: Scope) -> str:
        scope, parts = dict(scope), []
        for node in nodes:
            if node[0] == "text":
                parts.append(node[1])
            elif node[0] == "if":
                chosen = node[2] if self._value(node[1], scope) else node[3]
                parts.append(self.text(chosen, scope))
            elif node[0] == "range":
                parts += [self.text(node[2], inner) for inner in self._each(node[1], scope)]
            elif ":=" in node[1]:
                name, _, code = node[1].partition(":=")
                scope[name.strip()] = self._value(code, scope)
            else:
                parts.append(_text(self._value(node[1], scope)))
        return "".join(parts)

    def _each(self, code: str, scope: Scope) -> Iterator[Scope]:
        names, _, source = code.rpartition(":=")
        items = self._value(source, scope)
        pairs = sorted(items.items()) if isinstance(items, dict) else list(enumerate(items))
        for pair in pairs:
            named = dict(zip(re.findall(r"\$\w+", names), pair, strict=bool(names)))
            yield {**scope, **named, ".": pair[1]}

    def _value(self, code: str, scope: Scope) -> Any:
        words = [*_WORD.findall(code), ")"]
        return self._pipeline(iter(words), scope)

    def _pipeline(self, words: Iterator[str], scope: Scope) -> Any:
        """Up to the closing bracket. The result of a call is the last argument of the next."""
        calls: list[list[Any]] = [[]]
        for word in words:
            if word == ")":
                break
            if word == "|":
                calls.append([])
            elif word == "(":
                calls[-1].append(self._pipeline(words, scope))
            elif not calls[-1] and (word in _FUNCTIONS or word in ("include", ".Files.Get")):
                calls[-1].append(word)
            else:
                calls[-1].append(_operand(word, scope))
        carried: list[Any] = []
        for name, *arguments in calls:
            if name == "include":
                inner = {".": arguments[1], "$": arguments[1]}
                carried = [self.text(self._defined[arguments[0]], inner)]
            elif name == ".Files.Get":
                carried = [(CHART / arguments[0]).read_text()]
            elif isinstance(name, str) and name in _FUNCTIONS:
                carried = [_FUNCTIONS[name](*arguments, *carried)]
            else:
                assert not arguments and not carried, f"unknown function {name!r}"
                carried = [name]
        return carried[0]


def _operand(word: str, scope: Scope) -> Any:
    if word.startswith('"'):
        return json.loads(word)
    if word.lstrip("-").isdigit():
        return int(word)
    name, _, path = word.partition(".")
    assert word[0] in ".$", f"unknown word {word!r}"
    value = scope[name or "."]
    for field in filter(None, path.split(".")):
        assert field in value, f"{word}: no {field}"
        value = value[field]
    return value


def _text(value: Any) -> str:
    """As Go prints it: a float from a million on with an exponent."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, float):
        return str(value)
    exact = Decimal(repr(value)).normalize()
    if -4 <= exact.adjusted() < 6:
        return f"{exact:f}"
    mantissa = exact.scaleb(-exact.adjusted())
    return f"{mantissa:f}e{exact.adjusted():+03d}"


def _json(value: Any) -> str:
    def plain(inner: Any) -> Any:
        if isinstance(inner, dict):
            return {key: plain(inner[key]) for key in sorted(inner)}
        if isinstance(inner, list):
            return [plain(each) for each in inner]
        whole = isinstance(inner, float) and inner == int(inner)
        return int(inner) if whole else inner

    return json.dumps(plain(value), separators=(",", ":"))


def _nindent(count: int, text: str) -> str:
    return "\n" + "\n".join(" " * count + line for line in text.split("\n"))


def _or(*values: Any) -> Any:
    return next((value for value in values if value), values[-1])


def _and(*values: Any) -> Any:
    return next((value for value in values if not value), values[-1])


_KINDS = {"string": str, "float64": float, "bool": bool}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(map(int, numbers)),
    "and": _and,
    "div": lambda one, other: int(one) // int(other),
    "gt": lambda one, other: one > other,
    "hasKey": lambda map_, key: key in map_,
    "int": int,
    "join": lambda separator, items: separator.join(items),
    "kindIs": lambda kind, value: isinstance(value, _KINDS[kind]),
    "nindent": _nindent,
    "not": lambda value: not value,
    "or": _or,
    "quote": lambda value: json.dumps(_text(value)),
    "replace": lambda old, new, text: text.replace(old, new),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toJson": _json,
    "toYaml": lambda value: yaml.safe_dump(
        json.loads(_json(value)), default_flow_style=False
    ).rstrip(),
    "trim": str.strip,
}
