"""Reads whole calls whose arguments are literals: Python's, or Gemma's, whose texts are escaped."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from kvserve.server.parsers.json_text import read_json, write_json

_ESCAPE = re.compile(r'<\|"\|>|<escape>')
_ESCAPED = re.compile(r"call:(?P<name>[\w.-]{1,128})(?P<object>\{.*\})\s*", re.DOTALL)
_KEY = re.compile(r"([{,]\s*)([\w.$-]+)(?=\s*:)")


def python_calls(text: str) -> list[tuple[str, str]]:
    """Calls in a list of Python's; none if it is not one of calls with literal arguments."""
    try:
        found = ast.parse(text, mode="eval").body
        calls = []
        for call in found.elts if isinstance(found, ast.List) else ():
            if not isinstance(call, ast.Call) or call.args:
                return []
            values: dict[str, Any] = {}
            for each in call.keywords:
                value = ast.literal_eval(_JsonNames().visit(each.value))
                values |= value if each.arg is None else {each.arg: value}  # None: of **{...}
            calls.append((ast.unparse(call.func), write_json(values)))
        return calls
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


class _JsonNames(ast.NodeTransformer):
    """Reads ``true``, ``false`` and ``null`` as well: OLMo 3 writes values as JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def escaped_call(text: str) -> tuple[str, str] | None:
    """The name and the arguments of ``call:f{a:<escape>text<escape>,b:1}``."""
    pieces = _ESCAPE.split(text)
    # Between two marks stands text, elsewhere JSON whose keys have no quotes.
    pieces[::2] = [_KEY.sub(r'\1"\2"', piece) for piece in pieces[::2]]
    pieces[1::2] = [json.dumps(piece, ensure_ascii=False) for piece in pieces[1::2]]
    call = _ESCAPED.fullmatch("".join(pieces))
    if call is None or not isinstance(arguments := read_json(call["object"]), dict):
        return None
    return call["name"], write_json(arguments)
