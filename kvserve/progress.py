"""Progress of what takes long: a bar on a terminal, lines of the log elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from kvserve.log import logger

_SECONDS = 10.0
"""Between two lines of the log; what takes less than this writes none."""
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} so far, {remaining} left"


def progress(items: Iterable[Any] | None = None, *, hidden: bool = False, **named: Any) -> Any:
    """tqdm over ``items``, or with a ``total``; ``desc`` and ``unit`` as tqdm has them."""
    if hidden or sys.stderr.isatty():
        return tqdm(items, disable=hidden, **named)
    every: dict[str, Any] = {"mininterval": _SECONDS, "delay": _SECONDS, "bar_format": _LINE}
    return tqdm(items, file=_Log(), **{"desc": "progress", **every, **named})


class _Log:
    """A file whose lines go to the log; tqdm begins each with a carriage return."""

    def write(self, text: str) -> None:
        if line := text.strip():
            logger.info("%s", line)

    def flush(self) -> None:
        pass
