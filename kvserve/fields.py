"""Settings and parameters: each is declared once, as a dataclass field with what it may be.

From the declaration come the flag and what the environment and a file may say (``flags.py``), and
what Python may give: values are checked here alone. Fields of policies and of requests are compared
with their limits by the same words (``number_wanted``).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

from kvserve.log import ConfigError, shown

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_WANTED = {int: "an integer", float: "a number", str: "a text", bool: "True or False"}
_NUMBERS: dict[Any, type] = {int: Integral, float: Real}
FINITE = sys.float_info.max
"""The ``most`` of a number that may be any but infinity."""


def setting(default: Any, help: str, **facts: Any) -> Any:
    """A dataclass field that is a setting.

    ``facts`` may hold ``choices``, ``synonyms`` (other names of choices), ``aliases`` (other
    flags), and limits of numbers: ``least`` or ``above``, and ``most``. A help text with "accepts"
    in it: its numbers may be written as ``32k`` or ``2GiB``.

    The flag is the field's name with dashes (``max_num_seqs`` -> ``--max-num-seqs``).
    """
    metadata = {"help": help, **facts}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def limited(default: Any, **limits: float) -> Any:
    """A dataclass field that is a number and no setting; ``limits`` as above."""
    return field(default=default, metadata=limits)


@dataclass(frozen=True)
class Setting:
    """One setting as it is declared. ``kind``: its type, without ``None``; ``one``: that of a
    tuple's values, else its own."""

    name: str
    kind: type
    one: type
    optional: bool
    default: Any
    help: str = ""
    choices: tuple[str, ...] | None = None
    synonyms: Mapping[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def checked(self, value: Any) -> Any:
        """A value given from Python, with sizes read. ``ConfigError`` names it and its flag."""
        if value is None and self.optional:
            return None
        if self.kind is tuple:
            if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
                raise self._wrong(f"a list, each of it {_WANTED[self.one]}", value)
            return tuple(map(self._single, value))
        if self.kind is dict:
            if not isinstance(value, Mapping):
                raise self._wrong("a mapping of names to values", value)
            return value
        value = self._single(value)
        return self.synonyms.get(value, value) if self.synonyms else value

    def complaint(self, value: Any) -> str | None:
        """What a number must be, in words; ``None`` if it is, or if this is no number."""
        if self.kind not in _NUMBERS or (value is None and self.optional):
            return None
        return number_wanted(value, self.kind, self.least, self.most, self.above)

    @property
    def sized(self) -> bool:
        """Whether it may be written as ``32k`` or ``2GiB``."""
        return self.one is int and "accepts" in self.help

    def _single(self, value: Any) -> Any:
        kind = self.one
        if isinstance(value, str) and self.sized:
            try:
                return read_size(value)
            except ValueError as error:
                raise ConfigError(f"{self.name} ({self.option}): {error}") from None
        if kind is str and isinstance(value, os.PathLike):
            return os.fspath(value)
        wanted = _NUMBERS.get(kind, kind)
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool):
            sizes = ", or a text like '2GiB' or '32k'" if self.sized else ""
            raise self._wrong(_WANTED[kind] + sizes, value)
        return value

    def _wrong(self, wanted: str, value: object) -> ConfigError:
        place = f"{self.name} ({self.option})"
        return ConfigError(f"{place} must be {wanted}, got {shown(value):.200}")


_DECLARED: dict[type, tuple[Setting, ...]] = {}
"""By class, as far as they were asked for."""


def settings_of(kind: type) -> tuple[Setting, ...]:
    """What a dataclass declares by ``setting`` and ``limited``, in its order."""
    if kind not in _DECLARED:
        hints, found = get_type_hints(kind), fields(kind)
        _DECLARED[kind] = tuple(_declared(f, hints[f.name]) for f in found if f.metadata)
    return _DECLARED[kind]


def _declared(item: Field[Any], hint: Any) -> Setting:
    """``int | None`` -> ``int``, ``tuple[str, ...]`` -> ``tuple``, ``Mapping[...]`` -> ``dict``."""
    optional = NoneType in get_args(hint)
    hint = next(kind for kind in get_args(hint) if kind is not NoneType) if optional else hint
    kind = getattr(hint, "__origin__", hint)
    one = get_args(hint)[0] if kind is tuple else kind
    if issubclass(kind, Mapping):
        kind = one = dict
    default = item.default if item.default_factory is MISSING else item.default_factory()
    return Setting(item.name, kind, one, optional, default, **item.metadata)


def check_limits(settings: Any) -> None:
    """``ConfigError`` for the first setting whose value its declaration does not allow."""
    for item in settings_of(type(settings)):
        value = getattr(settings, item.name)
        if value is None and item.optional:
            continue
        if item.choices is not None and value not in item.choices:
            choices = ", ".join(item.choices)
            raise ConfigError(f"{item.option}: {value!r} is not one of {choices}")
        if item.kind in _NUMBERS and (wanted := item.complaint(value)) is not None:
            raise ConfigError(f"{item.option} must be {wanted}, got {shown(value):.200}")


def number_wanted(
    value: Any,
    kind: type,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    *,
    odd: bool = False,
) -> str | None:
    """What a number has to be, as in ``an integer of at least 1``; ``None`` if ``value`` is that.

    ``kind``: int or float. True and False are no numbers, NaN is none within limits.
    """
    is_number = isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
    too_large = is_number and most is not None and not value <= most
    enough = is_number and (above is None or value > above) and (least is None or value >= least)
    if enough and not too_large and not (odd and value % 2 == 0):
        return None
    noun = "an odd integer" if odd else "an integer" if kind is int else "a number"
    if kind is float and most not in (None, FINITE):
        low = f"({above:g}" if least is None else f"[{least:g}"
        return f"a number in {low}, {most:g}]"
    if too_large:
        return f"{noun} of at most {most}"
    if least is not None:
        return f"{noun} of at least {least}"
    return noun if above is None else f"{noun} above {above}"


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
