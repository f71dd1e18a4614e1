"""Pieces of Markdown that the reference pages share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence

_COMMAND = "python -m kvserve.server.reference docs/reference"


def written_by(source: str) -> str:
    """A comment that tells editors to edit ``source`` and not the page."""
    return f"<!-- written from {source} by `make docs` ({_COMMAND}); edit those -->\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under a head; bars and line breaks in cells are escaped."""
    lines = [head, ["---"] * len(head), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: its double backticks become single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(docstring or "")).strip()
