"""Fewer cases of a cross product by default; the rest of it is slow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def thinned(
    axes: Mapping[str, Sequence[Any]], *, together: int = 1, rest: bool | int = True
) -> pytest.MarkDecorator:
    """Parametrize with combinations of the axes' values, which stand under the names of arguments:
    ``{"size": [1, 2], "groups,heads": [(1, 1), (3, 2)]}``.

    By default so few of them run that each value is met, or each pair of values of two axes if
    ``together`` is 2. The others are slow, or are left out where ``rest`` is not asked for; if it
    is a number, as many as such a ``together`` would choose are slow.
    """
    cases = list(product(*axes.values()))
    chosen = _chosen(axes, together)
    slow = set(range(len(cases))) if rest is True else _chosen(axes, rest) if rest else set()
    names = [name.split(",") for name in axes]
    params = []
    for at, case in enumerate(cases):
        if at in chosen | slow:
            marks = [*_marks(case), *([] if at in chosen else [pytest.mark.slow])]
            params.append(pytest.param(*_flat(names, case), marks=marks))
    return pytest.mark.parametrize(list(chain(*names)), params)


def _chosen(axes: Mapping[str, Sequence[Any]], together: int) -> set[int]:
    """Few of the cases that meet each value, or several of them together."""
    cases = list(product(*axes.values()))
    # What each case meets: a value is known by its axis and its place in it.
    met = [
        frozenset(combinations(enumerate(places), together))
        for places in product(*(range(len(values)) for values in axes.values()))
    ]
    missing, chosen, used = set[Any]().union(*met), set[int](), Counter[Any]()
    while missing:
        # Of those that meet most, one whose values have run least.
        best = max(
            range(len(cases)),
            key=lambda at: (len(met[at] & missing), -sum(used[each] for each in met[at])),
        )
        chosen.add(best)
        missing -= met[best]
        used.update(met[best])
    return chosen


def slow(*values: Any) -> list[Any]:
    """Further values of one argument, as slow cases."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def _flat(names: list[list[str]], case: tuple[Any, ...]) -> list[Any]:
    """A value for each argument."""
    found = list[Any]()
    for name, value in zip(names, case, strict=True):
        marked = isinstance(value, ParameterSet)
        found += value.values if marked else value if len(name) > 1 else (value,)
    return found


def _marks(case: tuple[Any, ...]) -> list[Any]:
    """Those of values that are given as ``pytest.param``."""
    return [mark for value in case if isinstance(value, ParameterSet) for mark in value.marks]
