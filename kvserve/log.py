"""The one logger of the package, and the exceptions that cross its boundaries."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Iterable
from contextlib import suppress

logger = logging.getLogger("kvserve")


def configure_logging(level: str | int = "INFO") -> None:
    """Send the package's log to stderr; called by the command line, never on import."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def say(text: str) -> None:
    """Write to stderr; a write that fails, as on a full disk, is ignored."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200


def shown(value: object) -> str:
    """A value for a message: its ``repr``, shortened if it is large."""
    return _SHOWN.repr(value)


class ConfigError(ValueError):
    """A setting that cannot work. The message names the flag and what to do."""


class RequestError(ValueError):
    """A request that is refused (HTTP 400): ``param`` names the field, ``code`` is for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class SequenceError(RuntimeError):
    """A failure that concerns these sequences alone: only they end."""

    def __init__(self, message: str, seq_ids: Iterable[int]) -> None:
        super().__init__(message)
        self.seq_ids = frozenset(seq_ids)


class EngineDeadError(RuntimeError):
    """The engine stopped; every open request ends with this."""
