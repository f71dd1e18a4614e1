"""Progress of what takes long: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm

from kvserve.log import logger, say

_SECONDS = 10.0
"""Between two lines; what takes less than this writes none."""
_LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s, {elapsed} so far, {remaining} left"


def progress(items: Iterable[Any] | None = None, *, hidden: bool = False, **named: Any) -> Any:
    """tqdm over ``items``, or with a ``total``; ``desc`` and ``unit`` as tqdm has them."""
    if hidden or sys.stderr.isatty():
        return tqdm(items, disable=hidden, **named)
    every: dict[str, Any] = {"mininterval": _SECONDS, "delay": _SECONDS, "bar_format": _LINE}
    return tqdm(items, file=_Log(), **{"desc": "progress", **every, **named})


class _Log:
    """A file whose lines go to the log, or to stderr in programs that configure none (`bench`).

    tqdm begins each line with a carriage return.
    """

    def write(self, text: str) -> None:
        if not (line := text.strip()):
            return
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", line)
        else:
            say(f"{line}\n")

    def flush(self) -> None:
        pass
