"""The chart of deploy/helm as manifests: what its templates use of Helm's language, and no more.

Actions with trimming, ``if``/``else``, ``define``/``include``, fields and pipelines of the
functions below. A template that uses anything else is an error here, not a silent difference.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm"
_ACTION = re.compile(r"(\s*)\{\{-\s*(.*?)\s*(-?)\}\}|()\{\{\s*(.*?)\s*(-?)\}\}", re.DOTALL)

Node = tuple[Any, ...]


def render(**changes: Any) -> list[dict[str, Any]]:
    """All objects of the chart, with ``changes`` merged into its values."""
    return [item for text in texts(**changes).values() if (item := yaml.safe_load(text))]


def texts(**changes: Any) -> dict[str, str]:
    """Rendered templates by file."""
    values = _merged(yaml.safe_load((CHART / "values.yaml").read_text()), changes)
    defined: dict[str, list[Node]] = {}
    context = {"Values": values, "Release": {"Name": "llm", "Namespace": "models"}}
    found = {}
    for path in sorted(CHART.glob("templates/*")):  # _helpers.tpl first
        nodes = list(_parse(iter(_tokens(path.read_text())), defined))
        if path.suffix != ".tpl":
            found[path.name] = _render(nodes, context, defined)
    return {name: text for name, text in found.items() if name.endswith(".yaml")}


def _merged(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        assert key in values, f"values.yaml has no {key}"
        inner = values[key]
        both = isinstance(inner, dict) and inner and isinstance(value, dict)
        values[key] = _merged(inner, value) if both else value
    return values


# ---- the language -------------------------------------------------------------------------------


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    """("text", ...) and ("action", ...), trimmed as the dashes say."""
    at, trim = 0, False
    for match in _ACTION.finditer(text):
        plain = text[at : match.start()]
        yield "text", plain.lstrip() if trim else plain
        yield "action", match[2] if match[2] is not None else match[5]
        at, trim = match.end(), bool(match[3] or match[6])
    yield "text", text[at:].lstrip() if trim else text[at:]


def _parse(tokens: Iterator[tuple[str, str]], defined: dict[str, list[Node]]) -> Iterator[Node]:
    """Up to an ``else`` or ``end`` that nobody in front has opened; that comes last."""
    for kind, value in tokens:
        if kind == "text":
            yield "text", value
            continue
        word, _, rest = value.partition(" ")
        if word == "if":
            then = list(_parse(tokens, defined))
            otherwise = list(_parse(tokens, defined)) if then[-1] == ("else",) else []
            yield "if", rest, then, otherwise
        elif word == "define":
            defined[rest.strip('"')] = list(_parse(tokens, defined))
        elif word in ("else", "end"):
            yield (word,)
            return
        else:
            yield "value", value


def _render(nodes: list[Node], context: Any, defined: dict[str, list[Node]]) -> str:
    parts = []
    for node in nodes:
        if node[0] == "text":
            parts.append(node[1])
        elif node[0] == "if":
            chosen = node[2] if _value(node[1], context, defined) else node[3]
            parts.append(_render(chosen, context, defined))
        elif node[0] == "value":
            parts.append(_text(_value(node[1], context, defined)))
    return "".join(parts)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(pipeline: str, context: Any, defined: dict[str, list[Node]]) -> Any:
    result: list[Any] = []
    for call in pipeline.split(" | "):
        words = shlex.split(call, posix=False)
        arguments = [_operand(word, context) for word in words[1:]] + result
        if words[0] == "include":
            result = [_render(defined[arguments[0]], arguments[1], defined)]
        elif words[0] == ".Files.Get":
            result = [(CHART / words[1].strip('"')).read_text()]
        elif words[0] in _FUNCTIONS:
            result = [_FUNCTIONS[words[0]](*arguments)]
        else:
            assert len(words) == 1 and not result, f"unknown function in {pipeline!r}"
            result = [_operand(words[0], context)]
    return result[0]


def _operand(word: str, context: Any) -> Any:
    if word.startswith('"'):
        return word.strip('"')
    if word.lstrip("-").isdigit():
        return int(word)
    assert word.startswith("."), f"unknown word {word!r}"
    for name in filter(None, word.split(".")):
        assert name in context, f"{word}: no {name}"
        context = context[name]
    return context


def _nindent(count: int, text: str) -> str:
    return "\n" + "\n".join(" " * count + line for line in text.splitlines())


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": lambda *numbers: sum(numbers),
    "join": lambda separator, items: separator.join(items),
    "div": lambda one, other: one // other,
    "nindent": _nindent,
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "quote": lambda value: json.dumps(_text(value)),
    "sha256sum": lambda text: hashlib.sha256(text.encode()).hexdigest(),
    "toJson": json.dumps,
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip(),
}
