"""``kvserve eval --match-bytes``: budgets that hold equal bytes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from bench.harness.commands import evaluate
from bench.harness.measuring.match_bytes import (
    CLOSE,
    bounds_sequence,
    can_match,
    matched,
    with_budget_of,
)
from bench.harness.setup.policy_spec import PolicySpec, every_policy
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import policy_names
from kvserve.server.cli.commands import run


def test_a_budget_is_found_in_a_few_tries() -> None:
    tried = []

    def held(spec: PolicySpec) -> float:
        tried.append(spec.fields["budget"])
        return 5000.0 + 130 * min(spec.fields["budget"], 900) ** 0.98

    spec = PolicySpec("snapkv", {"trigger": "threshold", "budget": 100, "threshold": 164})
    found = matched(spec, 60_000.0, 4096, held)
    assert abs(held(found) / 60_000 - 1) <= CLOSE and len(tried) < 12
    assert found.fields["threshold"] - found.fields["budget"] == 64


@pytest.mark.parametrize(
    ("name", "given", "target", "found"),
    [
        ("kara", {"ratio": 0.3}, 0.3, {"ratio": "3/10"}),
        ("snapkv", {}, 10, {"budget": 33}),  # keeps its window of 32
        ("kara", {}, 162, {"budget": 162}),  # of a window, and so below it
        ("kara", {}, 102, {"budget": 129}),  # the newest 128 are always kept
    ],
)
def test_the_nearest_that_is_allowed(
    name: str, given: dict[str, Any], target: float, found: dict[str, Any]
) -> None:
    def held(spec: PolicySpec) -> float:
        return float(Fraction(spec.fields.get("ratio") or spec.fields["budget"]))

    assert matched(PolicySpec(name, given), target, 8192, held).fields == found


def test_a_policy_without_a_budget_is_left_alone() -> None:
    assert not can_match(PolicySpec("none"))
    with pytest.raises(PolicyError, match="has no budget that 20 entries allow"):
        matched(PolicySpec("snapkv"), 10.0, 20, lambda spec: 1.0)


def test_a_budget_of_a_sequence() -> None:
    """What it held, without a prompt that takes no part; at least what the policy always keeps."""
    bounded = PolicySpec("snapkv", {"trigger": "threshold"})
    for spec, budget in (
        (PolicySpec("streaming_llm"), 300),
        (PolicySpec("rkv"), 300),
        (PolicySpec("windowkv"), 300),
        (bounded, 200),
        (PolicySpec("snapkv", {**bounded.fields, "protect_prompt": False}), 300),
        (PolicySpec("snapkv", {**bounded.fields, "budget": 50, "threshold": 66}), 200),
    ):
        given = with_budget_of(spec, held=300, num_prompt=100, most=4096)
        assert given.fields["budget"] == budget, spec.label
    assert given.fields["threshold"] == 216
    assert with_budget_of(bounded, 101, 100, 4096).fields["budget"] == 33
    with pytest.raises(PolicyError):
        with_budget_of(bounded, 20, 10, 20)
    assert not bounds_sequence(PolicySpec("kara")) and not bounds_sequence(PolicySpec("spindlekv"))


def test_all_policies_but_those_of_prompts_have_events_while_decoding() -> None:
    names = {spec.name for spec in every_policy()}
    assert set(policy_names()) - names == {"none", "dynamickv", "windowkv"}


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_TRIALS", 1)
    flags = ["eval", "--tasks", "chain", "--num-samples", "2", "--disable-tqdm", "--seed", "3"]
    flags += [
        "--policy",
        "streaming_llm:budget=300,period=16",
        "--policy",
        "keydiff:trigger=threshold",
    ]
    assert run([*flags, "--match-bytes", "streaming_llm"]) == 0
    assert "keydiff:trigger=threshold,budget=" in capsys.readouterr().out
    assert run([*flags, "--match-bytes", "much"]) == 1
    assert "'much' is neither bytes nor one of none, streaming_llm" in capsys.readouterr().err
