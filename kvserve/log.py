"""The package's logger and its exceptions."""

from __future__ import annotations

import logging
import os
import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

logger = logging.getLogger("kvserve")


def configure_logging(level: str | int = "INFO") -> None:
    """Send the package's log to stderr. Programs call this; importing the package does not."""
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(
            logging.Formatter("%(levelname)s %(asctime)s %(message)s", datefmt="%m-%d %H:%M:%S")
        )
        logger.addHandler(handler)
        logger.propagate = False
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def say(text: str) -> None:
    """Write to stderr. Errors are ignored, because stderr may be a file on a full disk; and its
    buffer is passed by, because Python ends with an error if that cannot be written."""
    own = sys.stderr is sys.__stderr__  # not so in a notebook
    data = text.encode(errors="backslashreplace") if own else b""
    with suppress(OSError):
        if not own:
            sys.stderr.write(text)
        sys.stderr.flush()
        while data:
            data = data[os.write(sys.stderr.fileno(), data) :]


_logged: set[str] = set()


def log_once(message: str) -> None:
    """Warn of what may come with every request; of a thousand such things at most."""
    if message not in _logged and len(_logged) < 1000:
        _logged.add(message)
        logger.warning("%s", message)


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200


def shown(value: object) -> str:
    """A value for a message: its ``repr``, shortened if it is large."""
    return _SHOWN.repr(value)


class ConfigError(ValueError):
    """A setting is wrong or cannot work. The message names the flag and says what to change."""


class RequestError(ValueError):
    """A request is refused. ``param`` names the field at fault; ``code`` is for programs.

    The server answers with HTTP 400, or with 429, 500 or 503 where ``code`` says that the engine
    and not the request is the cause (``out_of_memory``, ``too_many_policies``, ...).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code

    def renamed(self, names: Mapping[Any, str]) -> RequestError:
        """The same error, if it is about a field in ``names``, under the name that it has there."""
        name = names.get(self.param)
        if name is None:
            return self
        word = rf"(?<!\ba )\b{re.escape(str(self.param))}\b(?! is too long)"  # not the noun
        words = re.sub(word, name, str(self), count=1)
        return RequestError(words, param=name, code=self.code)


def too_long(tokens: int, limit: int, said: str, param: str) -> RequestError:
    """The refusal of what does not fit the context: the words by which clients know that, and then
    ours."""
    most = min(limit, tokens - 1)
    return RequestError(
        f"prompt is too long: {tokens} tokens > {most} maximum: {said}",
        param=param,
        code="context_length_exceeded",
    )


class SequenceError(RuntimeError):
    """A step failed because of the sequences ``seq_ids``. Only these end; the engine goes on."""

    def __init__(self, message: str, seq_ids: Iterable[int]) -> None:
        super().__init__(message)
        self.seq_ids = frozenset(seq_ids)


class EngineDeadError(RuntimeError):
    """The engine has stopped. Every open request and every later one ends with this."""
