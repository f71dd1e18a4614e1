"""No number of any policy is without bounds, and what exceeds them is refused by its name."""

from __future__ import annotations

from dataclasses import Field, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

import pytest

from kvserve.engine.policies.base import PolicyError, argument
from kvserve.engine.policies.budgeted import BudgetedPolicy
from kvserve.engine.policies.parts import arguments, common
from kvserve.engine.policies.parts.arguments import MOST_TOKENS, counts_tokens, most_of, types_of
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.policies.scoring import POOLINGS
from tests.engine.policies.test_schema import refused


def numbers(name: str) -> list[Field[Any]]:
    """The fields of a policy that are numbers."""
    return [
        f
        for f in fields(policy_class(name))
        if {"int", "float"} & set(types_of(f)) and not f.metadata["fraction"]
    ]


EACH = pytest.mark.parametrize("name", [name for name in policy_names() if numbers(name)])


@EACH
def test_what_is_beyond_a_numbers_bounds_is_refused_by_name(name: str) -> None:
    for f in numbers(name):
        least, most = f.metadata["least"], most_of(f)
        assert least is not None and most is not None and least < most, f.name
        for value in (int(most) + 1, 2**31 - 1, 2**31, 2**64, -(2**64), 10**5000, float("inf")):
            assert refused(name, f.name, value), (f.name, value)


@pytest.mark.parametrize("text", ["1e999999999", "1e-999999999", "1/" + "9" * 4000, "9" * 4000])
def test_a_ratio_is_refused_before_it_is_written_out(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Exact(Fraction):
        def __new__(cls, *given: Any) -> Exact:
            assert text not in given, "this would take minutes"
            return super().__new__(cls, *given)

    monkeypatch.setattr(arguments, "Fraction", Exact)
    for name in ("snapkv", "kara", "spindlekv", "adakv"):
        with pytest.raises(PolicyError) as error:
            make_policy({"name": name, "ratio": text})
        assert error.value.argument == "ratio" and len(str(error.value)) < 300


@pytest.mark.parametrize("value", [0.07, 1e-5, "3/10", " 1/3 ", "0.25", ".5", 1, 1.0, 1 / 3])
def test_a_ratio_is_taken_as_it_is_written(value: Any) -> None:
    make_policy({"name": "snapkv", "ratio": value})


@pytest.mark.parametrize("value", [True, False, None, [1], {"a": 1}, "many", "", "."])
def test_what_is_no_ratio_is_refused(value: Any) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy({"name": "spindlekv", "ratio": value})
    assert error.value.argument == "ratio"


# ---- against a server's context -----------------------------------------------------------------


@EACH
def test_tokens_stay_below_the_context(name: str) -> None:
    """Checked field by field: what another one says to it does not matter here."""
    for f in numbers(name):
        check_context(name, f)


def check_context(name: str, f: Field[Any]) -> None:
    policy = object.__new__(policy_class(name))
    for each in fields(policy_class(name)):
        object.__setattr__(policy, each.name, each.default)
    object.__setattr__(policy, f.name, 1001)
    if name == "adakv":
        object.__setattr__(policy, "scores_by", make_policy("none"))
    if counts_tokens(f):
        with pytest.raises(PolicyError, match=f"{f.name} must be at most the context of 1000"):
            policy.check_bounds(1000)
    policy.check_bounds(1001)


def test_defaults_are_never_too_large() -> None:
    make_policy("kara").check_bounds(100)


def test_a_scorer_s_arguments_are_checked_too() -> None:
    policy = make_policy(
        {"name": "adakv", "ratio": 0.5, "scorer": {"name": "snapkv", "window": 50}}
    )
    policy.check_bounds(50)
    with pytest.raises(PolicyError, match="scorer: window must be at most the context of 49"):
        policy.check_bounds(49)


# ---- what else metadata say ---------------------------------------------------------------------


@dataclass(frozen=True)
class Loud(BudgetedPolicy):
    """Has no checks of its own."""

    name: ClassVar[str] = "loud"

    loudness: float = argument(0.5, "how loud", least=0, most=1)
    echoes: int = argument(2, "repetitions", least=0)
    pause: int | None = argument(None, "between them", least=1, above="echoes", at_most="budget")
    tone: str = argument("high", "pitch", choices=("high", "low"))
    taps: int = argument(3, "of the filter", least=1, most=9, odd=True)
    again: bool = argument(True, "once more")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loudness": 2}, r"loudness must be a number in \[0, 1\], got 2"),
        ({"loudness": True}, "loudness"),
        ({"echoes": -1}, "echoes must be an integer of at least 0, got -1"),
        ({"echoes": MOST_TOKENS + 1}, f"echoes must be an integer of at most {MOST_TOKENS}"),
        ({"pause": 2}, r"pause must be an integer above echoes \(2\), got 2"),
        ({"pause": 65}, r"pause must be an integer at most budget \(64\), got 65"),
        ({"tone": "flat"}, "tone must be high or low, got 'flat'"),
        ({"taps": 4}, "taps must be an odd integer of at least 1, got 4"),
        ({"taps": 11}, "taps must be an odd integer of at most 9, got 11"),
        ({"again": 1}, "again must be True or False, got 1"),
    ],
)
def test_a_policy_is_held_to_its_metadata(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message) as error:
        Loud(**{"budget": 64, **fields})
    assert error.value.argument == next(iter(fields))
    Loud(budget=64, pause=3)


def test_poolings_are_those_of_the_kernels() -> None:
    assert common.POOLINGS == POOLINGS
