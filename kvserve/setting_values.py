"""Values of settings: the types that a dataclass's fields want, and sizes written as text."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args

from kvserve.log import ConfigError, shown

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WANTED = {int: "a whole number", float: "a number", str: "a text", bool: "True or False"}
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}


def read_size(text: str) -> int:
    """A whole number: ``32k`` = 32,000; ``32K`` = ``32Ki`` = 32,768; ``2GiB``; ``1.5GB``.

    Raises ``ValueError`` for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([kmgtKMGT]?)(iB|i|B|b)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a whole number like 4096, 32k or 2GiB")
    number, unit, suffix = match.groups()
    binary = suffix in ("i", "iB") or (suffix is None and unit in _BINARY_UNITS)
    factor = _BINARY_UNITS[unit.upper()] if unit and binary else _UNITS[unit.lower()]
    value = float(number) * factor
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(number) * factor if number.isdigit() else int(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean NAME?`` if one of the known names is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""


def kind_of(hint: Any) -> type:
    """``int | None`` -> ``int``, ``tuple[str, ...]`` -> ``tuple``, ``Mapping[...]`` -> ``dict``."""
    arguments = [argument for argument in get_args(hint) if argument is not NoneType]
    if NoneType in get_args(hint):
        return kind_of(arguments[0])
    origin = getattr(hint, "__origin__", hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return dict
    return origin if isinstance(origin, type) else str


def takes_sizes(item: Field[Any]) -> bool:
    """Whether a setting's numbers may be written as ``32k`` or ``2GiB``."""
    return "accepts" in item.metadata["help"]


def checked(item: Field[Any], hint: Any, value: Any) -> Any:
    """A setting given from Python, with sizes read. ``ConfigError`` names it and its flag."""
    kind = kind_of(hint)
    if value is None and NoneType in get_args(hint):
        return None
    if kind is tuple:
        one: Any = get_args(hint)[0]
        if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
            raise _wrong(item, f"a list, each of it {_WANTED[one]}", value)
        return tuple(_single(item, one, part) for part in value)
    if kind is dict:
        if not isinstance(value, Mapping):
            raise _wrong(item, "a mapping of names to values", value)
        return value
    return _chosen(item, _single(item, kind, value))


def check_limits(settings: Any) -> None:
    """``ConfigError`` for a setting that is none of its ``choices``, or lower than the ``least``
    that its field declares, or not ``above`` what it declares."""
    for item in fields(settings):
        value, flag = getattr(settings, item.name), f"--{item.name.replace('_', '-')}"
        choices, least, above = map(item.metadata.get, ("choices", "least", "above"))
        if value is None:
            continue
        if choices is not None and value not in choices:
            raise ConfigError(f"{flag}: {value!r} is not one of {', '.join(map(str, choices))}")
        if least is not None and not value >= least:
            raise ConfigError(f"{flag} must be >= {least}")
        if above is not None and not value > above:
            raise ConfigError(f"{flag} must be above {above}")


def _single(item: Field[Any], kind: Any, value: Any) -> Any:
    if kind is int and isinstance(value, str) and takes_sizes(item):
        try:
            return read_size(value)
        except ValueError as error:
            raise ConfigError(f"{_named(item)}: {error}") from None
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    wanted = _NUMBERS.get(kind, kind)
    if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
        sizes = ", or a text like '2GiB' or '32k'" if kind is int and takes_sizes(item) else ""
        raise _wrong(item, _WANTED[kind] + sizes, value)
    return value


def _chosen(item: Field[Any], value: Any) -> Any:
    """The value, or the one that another name of it stands for."""
    value = item.metadata.get("synonyms", {}).get(value, value)
    choices = item.metadata.get("choices")
    if choices is not None and value not in choices:
        raise _wrong(item, f"one of {', '.join(map(str, choices))}", value)
    return value


def _wrong(item: Field[Any], wanted: str, value: object) -> ConfigError:
    return ConfigError(f"{_named(item)} must be {wanted}, got {shown(value):.200}")


def _named(item: Field[Any]) -> str:
    return f"{item.name} (--{item.name.replace('_', '-')})"
