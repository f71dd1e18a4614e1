"""Settings as text: their flags, and what the environment and a file may say."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from kvserve.fields import Setting, read_size

_METAVARS = {int: "N", float: "X", dict: "JSON"}


def add_flag(
    declared: Setting,
    parser: argparse._ActionsContainer,
    *more: str,
    default: Any = argparse.SUPPRESS,
) -> None:
    """Add the flag, under further names too; ``default`` is what the parser says without it."""
    options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
    if declared.kind is not bool:
        metavar = _METAVARS.get(declared.kind, "VALUE")
        if declared.choices is not None:
            metavar = "{" + ",".join(declared.choices) + "}"
        options = {"metavar": metavar, "type": partial(read, declared)}
    if declared.kind is tuple:
        options["nargs"] = "+"
    names = declared.option, *declared.aliases, *more
    parser.add_argument(
        *names, dest=declared.name, default=default, help=_help(declared), **options
    )


def _help(declared: Setting) -> str:
    text = declared.help.replace("%", "%%")
    if declared.default in (None, (), {}, "") or declared.default is False:
        return text
    return f"{text} (default: {'on' if declared.default is True else declared.default})"


def read(declared: Setting, text: str) -> Any:
    """One value from text. Raises ``argparse.ArgumentTypeError``, which says what is wrong."""
    if declared.kind is tuple and text.startswith("["):
        raise argparse.ArgumentTypeError("give the values one after the other, without [ ]")
    try:
        value: Any = read_size(text) if declared.sized else _READERS[declared.one](text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None
    value = declared.synonyms.get(value, value) if declared.synonyms else value
    if declared.choices is not None and value not in declared.choices:
        choices = ", ".join(declared.choices)
        raise argparse.ArgumentTypeError(f"{value!r} is not one of {choices}")
    if (wanted := declared.complaint(value)) is not None:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return value


def read_plain(declared: Setting, value: Any) -> Any:
    """A value from the environment, as text, or from YAML, which has lists and numbers too."""
    if declared.kind is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list):
            raise argparse.ArgumentTypeError(f"{value!r} is not a list")
        return [read(declared, str(item).strip()) for item in items]
    if declared.kind is dict and isinstance(value, dict):
        return value
    if value is None or isinstance(value, list | dict):
        raise argparse.ArgumentTypeError(f"{value!r} is not a single value")
    return read(declared, str(value))


def number_reader(kind: type, **limits: float | None) -> Callable[[str], Any]:
    """A type for ``argparse``: numbers within these limits, written as those of settings are."""
    return partial(read, Setting("", kind, kind, False, None, **limits))  # type: ignore[arg-type]


def read_object(text: str) -> dict[str, Any]:
    """A JSON object. Raises ``ValueError``, which says what is wrong."""
    try:
        value = json.loads(text, object_pairs_hook=_once_each)
    except ValueError as exc:
        raise ValueError(f"{text!r} is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{text!r} is not a JSON object")
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a name that is given twice one value would be ignored."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return value


def read_any(text: str) -> Any:
    """Numbers (``.5`` too), booleans, null and JSON as such; anything else is the text itself."""
    try:
        return json.loads(re.sub(r"^(-?)\.", r"\g<1>0.", text))
    except ValueError:
        return text


def _read_number(kind: type, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{text!r} is not {what}") from None


def _read_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError(f"{text!r} is not true or false")
    return words[text.lower()]


_READERS: dict[type, Any] = {
    **{int: lambda text: _read_number(int, text), float: lambda text: _read_number(float, text)},
    **{bool: _read_bool, dict: read_object, str: str},
}
