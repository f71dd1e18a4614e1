"""Finds the budget under which a policy holds a given number of bytes per sequence, or as many
entries of each sequence as another policy did."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from bench.harness.setup.policy_spec import PolicySpec
from kvserve.engine.policies.base import PolicyError
from kvserve.log import ConfigError
from kvserve.scheduler.triggers.whole_row import WhenOver

CLOSE = 0.005
"""A budget within this part of the bytes is taken."""
_FINEST = 1000  # a ratio is a multiple of 1 / _FINEST


def target_of(text: str | None, policies: Sequence[PolicySpec]) -> PolicySpec | float | None:
    """What ``--match-bytes`` says: one of the policies, or bytes."""
    named = [spec for spec in policies if text in (spec.label, spec.name)]
    if text is None or named:
        return named[0] if named else None
    if not text.isdigit() or int(text) == 0:
        labels = ", ".join(spec.label for spec in policies)
        raise ConfigError(f"--match-bytes: {text!r} is neither bytes nor one of {labels}")
    return float(text)


def can_match(spec: PolicySpec) -> bool:
    """Whether a policy has a budget or a ratio to change."""
    return spec.has_field("budget") or spec.has_field("ratio")


def bounds_sequence(spec: PolicySpec) -> bool:
    """Whether a policy's budget is of a sequence; Kara's is of a window."""
    return spec.has_field("budget") and not spec.has_field("buffer")


def with_budget_of(spec: PolicySpec, held: int, num_prompt: int, most: int) -> PolicySpec:
    """``spec`` with a budget of ``held`` entries, or the least that it allows above.

    A prompt of ``num_prompt`` tokens that takes no part does not count. ``PolicyError`` if no
    budget up to ``most`` is allowed.
    """
    trigger = _with(spec, most, by_ratio=False).trigger
    if isinstance(trigger, WhenOver) and trigger.protect_prompt:
        held -= num_prompt
    sizes = range(max(1, held), most)
    allowed = (size for size in sizes if _allowed(spec, size, by_ratio=False))
    return _with(spec, next(allowed, most), by_ratio=False)


def matched(
    spec: PolicySpec, target: float, most: int, held: Callable[[PolicySpec], float]
) -> PolicySpec:
    """``spec`` with the budget, at most ``most`` entries, that holds nearest to ``target`` bytes.

    Its ratio changes where it was given, or where it has no budget; a threshold that was given
    stays as far above the budget as it was. ``held`` measures a policy's bytes, which grow with its
    budget.
    """
    by_ratio = "ratio" in spec.fields or not spec.has_field("budget")
    low, high = 1, _FINEST - 1 if by_ratio else most
    bounded = not _allowed(spec, high, by_ratio=by_ratio)
    known: dict[int, float] = {}
    while low <= high:
        size = _next(low, high, target, known)
        try:
            known[size] = held(_with(spec, size, by_ratio=by_ratio))
        except PolicyError:  # more than a window has, or less than what is always kept
            too_large = size > min(known) if known else bounded
            low, high = (low, size - 1) if too_large else (size + 1, high)
            continue
        if abs(known[size] / target - 1) <= CLOSE:
            break
        low, high = (size + 1, high) if known[size] < target else (low, size - 1)
    if not known:
        raise PolicyError(f"{spec.label} has no budget that {most} entries allow", "budget")
    nearest = min(known, key=lambda size: abs(known[size] - target))
    return _with(spec, nearest, by_ratio=by_ratio)


def _next(low: int, high: int, target: float, known: Mapping[int, float]) -> int:
    """A size in [low, high]: on the line between the nearest ones on both sides, else halfway."""
    below = max((size for size in known if size < low), default=None)
    above = min((size for size in known if size > high), default=None)
    if below is None or above is None:
        return (low + high) // 2
    share = (target - known[below]) / (known[above] - known[below])
    return min(max(round(below + share * (above - below)), low), high)


def _allowed(spec: PolicySpec, size: int, *, by_ratio: bool) -> bool:
    try:
        _with(spec, size, by_ratio=by_ratio)
    except PolicyError:
        return False
    return True


def _with(spec: PolicySpec, size: int, *, by_ratio: bool) -> PolicySpec:
    if by_ratio:
        return spec.with_fields(ratio=str(Fraction(size, _FINEST)))
    more: dict[str, Any] = {"budget": size}
    if "threshold" in spec.fields and "budget" in spec.fields:
        more["threshold"] = size + spec.fields["threshold"] - spec.fields["budget"]
    return spec.with_fields(**more)
