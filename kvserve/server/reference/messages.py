"""``messages.md``: every error message that names a flag, a field or a command to change."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kvserve
from kvserve.server.reference.markdown import table, written_by

_INTRO = """\
# Messages

Every refusal that says what to change, by who raises it. A word in braces stands for a value.
Start-up errors end `kvserve` with status 1 (2 where the command line cannot be read); refused
requests are an HTTP 400 unless the [table of statuses](../server.md#errors) says otherwise.
[Troubleshooting](../troubleshooting.md) begins with the symptom.
"""
_START = frozenset({"ConfigError", "UsageError", "PolicyError"})
_REQUEST = frozenset({"RequestError", "ApiError", "unavailable"})
_ACTION = re.compile(
    r"(--[a-z]|\b(use|choose|raise|lower|drop|give|send|start|set|install|leave|retry|try|ask|"
    r"change|remove|name|make|must|needs?)\b)"
)
_FLAG = re.compile(r"--[a-z-]+\b.* (must|needs|go|leaves|is) ")
_PLACES = (
    ("When the server starts, or a command", _START),
    ("When a request comes", _REQUEST),
)
_SKIP = frozenset({"reference"})


def page() -> str:
    """The page: a table for each kind of error."""
    found = list(refusals())
    parts = [written_by("the code"), _INTRO]
    for title, kinds in _PLACES:
        rows = sorted({(text, where) for kind, text, where in found if kind in kinds})
        head = ["message", "raised in"]
        parts += [f"## {title}\n", table(head, [[f"`{text}`", where] for text, where in rows])]
    return "\n".join(parts)


def refusals() -> Iterator[tuple[str, str, str]]:
    """Name, text and file of every error whose message asks for an action."""
    root = Path(kvserve.__file__).parent
    for path in sorted(root.rglob("*.py")):
        where = path.relative_to(root)
        if _SKIP & set(where.parts):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            for kind, text in _messages(node):
                if _ACTION.search(text):
                    yield kind, text, f"`{where}`"


def _messages(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The text that an error is raised with, or that of a check: a tuple (condition, message)."""
    if isinstance(node, ast.Call) and (kind := _name(node)) in _START | _REQUEST:
        texts = [text for text in map(_text, node.args) if text]
        yield kind, max(texts, key=len, default="")
    if isinstance(node, ast.Tuple) and len(node.elts) == 2 and _FLAG.match(_text(node.elts[1])):
        yield "ConfigError", _text(node.elts[1])


def _name(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """The text of a string expression; filled-in values are shown as their names in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{_label(part.value)}}}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        ).replace("`", "'")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _label(node: ast.expr) -> str:
    """A short name for a value that is filled in."""
    words = re.findall(r"[a-zA-Z_]+", ast.unparse(node))
    return words[-1].lower() if words else "..."
