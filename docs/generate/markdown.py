"""Pieces of Markdown that the pages share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under a head; bars and line breaks in cells are escaped."""
    lines = [head, ["---"] * len(head), *(map(_cell, row) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: its double backticks become single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(docstring or "")).strip()
