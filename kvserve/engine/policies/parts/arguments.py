"""A policy's arguments: how a field is declared, and how it is checked.

A field's metadata say which values it may have. ``check_arguments`` checks every policy by them,
``schema`` makes the JSON Schema and the generated pages from them, and ``Policy.check_bounds``
compares arguments that count tokens with a server's context.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import Field, field, fields
from fractions import Fraction
from typing import Any

from kvserve.fields import number_wanted

MOST_TOKENS = 2**24
"""More than any context: the bound of integers that count tokens or entries."""

_RATIO = re.compile(r"\s*(\d{1,18}/\d{1,18}|\d{0,18}\.?\d{0,18}(e[+-]?\d{1,2})?)\s*", re.ASCII)
_MOST_SHOWN = 80


class PolicyError(ValueError):
    """A policy argument that cannot work; ``argument`` names it."""

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument

    @property
    def flag(self) -> str:
        """The command line's flag of the argument."""
        return f"--policy.{self.argument}" if self.argument != "name" else "--policy"


# ---- declaring ----------------------------------------------------------------------------------


def argument(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    odd: bool = False,
    fraction: bool = False,
    above: str | None = None,
    below: str | None = None,
    at_most: str | None = None,
    only_if: tuple[str, ...] = (),
    note: str = "",
    hashed: bool = True,
) -> Any:
    """Declare a policy's field: its default, its help text, and which values it may have.

    A number lies in ``[least, most]``; an integer without a ``most`` counts tokens or entries, and
    may not exceed the context (``Policy.check_bounds``). ``odd`` numbers are pooling kernels, a
    ``fraction`` is an exact part of 1. ``above``, ``below`` and ``at_most`` name another field, or
    a property, that it is compared with if both are given. It counts ``only_if`` other fields have
    such values, as in ``("pooling avg or max", "alpha below 1")``: elsewhere it may not be given
    (``check_counts``). ``note`` words other conditions. A value that may be a mapping is not
    ``hashed``.
    """
    facts = {"help": help, "choices": choices, "least": least, "most": most, "odd": odd}
    facts |= {"above": above, "below": below, "at_most": at_most}
    facts |= {"fraction": fraction, "only_if": only_if, "note": note}
    return field(default=default, hash=hashed, metadata=facts)


def like(owner: type[Any], name: str, **changes: Any) -> Any:
    """The argument ``name`` of another policy, with some facts changed, for example ``default``."""
    known = owner.__dataclass_fields__[name]
    return argument(**{"default": known.default, "hashed": known.hash, **known.metadata, **changes})


def field_names(policy: type[Any]) -> list[str]:
    """The names of a policy's arguments."""
    return [f.name for f in fields(policy)]


def types_of(f: Field[Any]) -> list[str]:
    """The names in a field's annotation: ``["int", "None"]``."""
    text = f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))
    return [part.strip() for part in text.split("|")]


def counts_tokens(f: Field[Any]) -> bool:
    """Whether an argument counts tokens or entries, and so may not exceed the context."""
    return "int" in types_of(f) and f.metadata.get("most") is None


def most_of(f: Field[Any]) -> float | None:
    """The largest value of an argument on any server; ``None``: not a number, or unbounded."""
    most: float | None = f.metadata.get("most")
    return MOST_TOKENS if counts_tokens(f) else most


# ---- checking -----------------------------------------------------------------------------------


def check_arguments(policy: Any) -> None:
    """Raise ``PolicyError`` unless every argument has a value that its metadata allow."""
    for f in fields(policy):
        value = getattr(policy, f.name)
        optional = "None" in types_of(f) and policy.needs != (f.name,)
        if value is not None or not optional:
            _check_value(f, value)
    for f in fields(policy):
        value = getattr(policy, f.name)
        for relation, holds in _RELATIONS.items() if value is not None else ():
            other = f.metadata.get(relation)
            bound = None if other is None else getattr(policy, other)
            if bound is not None:
                kind = "an integer " if "int" in types_of(f) else ""
                allowed = f"{kind}{relation.replace('_', ' ')} {other} ({bound})"
                require(holds(value, bound), f.name, value, allowed)


def check_counts(policy: Any, given: Mapping[str, Any], usual: Mapping[str, Any]) -> None:
    """Raise ``PolicyError`` for a given argument that can change nothing beside the others.

    Values that it would have anyway, which are ``usual`` or its default, may be given.
    """
    for f in fields(policy):
        if f.name not in given or given[f.name] == usual.get(f.name, f.default):
            continue
        for condition in f.metadata.get("only_if", ()):
            other, _, values = condition.partition(" ")
            value = getattr(policy, other)
            if not _holds(value, values):
                raise PolicyError(
                    f"{f.name} counts only with {condition}, and {other} is {_as_typed(value)}",
                    f.name,
                )


def _holds(value: Any, condition: str) -> bool:
    """Whether a value is one of those that a condition names; ``None`` is the policy's choice."""
    relation, _, bound = condition.partition(" ")
    if value is None or relation not in _RELATIONS:
        return value is None or _as_typed(value) in condition.split(" or ")
    return _RELATIONS[relation](Fraction(str(value)), Fraction(bound))


def _as_typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_value(f: Field[Any], value: Any) -> None:
    types, facts = types_of(f), f.metadata
    none = (None,) if "None" in types else ()
    if facts.get("fraction"):
        exact_ratio(value, f.name)
    elif facts.get("choices"):
        one_of(f.name, value, (*none, *facts["choices"]), facts.get("note", ""))
    elif "bool" in types:
        one_of(f.name, value, (*none, True, False))
    elif "float" in types or "int" in types:
        kind, is_odd = float if "float" in types else int, bool(facts.get("odd"))
        wanted = number_wanted(value, kind, facts.get("least"), most_of(f), odd=is_odd)
        require(wanted is None, f.name, value, str(wanted))
    elif types == ["str", "None"]:
        require(value is None or isinstance(value, str), f.name, value, "a string")


_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": operator.gt,
    "below": operator.lt,
    "at_most": operator.le,
}


def relations(facts: Mapping[str, Any]) -> list[str]:
    """What an argument is compared with, in words: ``["above window"]``."""
    return [f"{each.replace('_', ' ')} {facts[each]}" for each in _RELATIONS if facts.get(each)]


# ---- checking one value -------------------------------------------------------------------------


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``PolicyError`` naming the argument unless ``ok``."""
    if not ok:
        raise PolicyError(f"{name} must be {allowed}, got {_shown(value)}", name)


def exact_ratio(value: float | str | Fraction, name: str) -> Fraction:
    """A kept fraction as written: 0.07 is 7/100, not its binary neighbour; "3/10" works too."""
    ratio = Fraction(0)
    # The text is looked at first: a long exponent takes minutes to write out.
    if isinstance(value, str | float | Fraction) or value == 1:
        with suppress(ValueError, ZeroDivisionError):
            ratio = Fraction(str(value)) if _RATIO.fullmatch(str(value)) else ratio
    require(0 < ratio <= 1, name, value, "a number in (0, 1]")
    return ratio


def one_of(name: str, value: object, allowed: Iterable[object], note: str = "") -> None:
    """Check an enumeration; 1 is not True."""
    values = tuple(allowed)
    ok = any(type(value) is type(each) and value == each for each in values)
    require(ok, name, value, " or ".join(map(str, values)) + (f" ({note})" if note else ""))


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
