"""An argument that can change nothing beside the others is refused, with what makes it count."""

from __future__ import annotations

from dataclasses import Field, fields
from typing import Any

import pytest
import torch

from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.parts.arguments import types_of
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.triggers.pruning import Pruned

LAYERS, KV_HEADS, GROUP, ENTRIES, DIM, BUDGET = 4, 2, 2, 60, 8, 30
BESIDE: dict[str, dict[str, Any]] = {"align block": {"chunk_size": 16, "window": 4}}
"""What else a setting needs."""
NEEDED = ("budget", "window", "chunk_size", "buffer")


def conditions() -> list[Any]:
    """Every argument of every policy with each condition under which it counts."""
    return [
        pytest.param(name, f, condition, id=f"{name}-{f.name}-{condition.replace(' ', '_')}")
        for name in policy_names()
        for f in fields(policy_class(name))
        for condition in f.metadata["only_if"]
    ]


def broken(policy: str, condition: str) -> dict[str, Any]:
    """A setting that does not meet a condition."""
    other, _, values = condition.partition(" ")
    field = {f.name: f for f in fields(policy_class(policy))}[other]
    relation, _, bound = values.partition(" ")
    if relation in ("above", "below"):
        return {other: int(bound)}
    if "bool" in types_of(field):
        return {other: values != "true"}
    return {other: next(each for each in field.metadata["choices"] if each not in values)}


def setting(policy: str, condition: str) -> dict[str, Any]:
    """Arguments under which a condition does not hold; nothing else may be told from them."""
    given = broken(policy, condition)
    usual: dict[str, Any] = {"budget": BUDGET, "window": 16 if policy == "spindlekv" else 4}
    if policy == "kara":
        usual = {"window": 16, "buffer": 4, "query_dtype": "model"}
    names = {f.name for f in fields(policy_class(policy))}
    ((other, value),) = given.items()
    if other == "query_source":
        usual.pop("query_dtype", None)
    beside = BESIDE.get(f"{other} {value}", {})
    return {**{name: each for name, each in usual.items() if name in names}, **beside, **given}


def another(f: Field[Any]) -> Any:
    """A value that is not the default."""
    facts = f.metadata
    if f.name == "query_dtype":
        return "fp8"
    if facts["choices"]:
        return next(each for each in reversed(facts["choices"]) if each != f.default)
    if "bool" in types_of(f):
        return not f.default
    if "float" in types_of(f):
        return (facts["least"] + facts["most"]) / 2
    if facts["at_most"]:
        return 1
    number: Any = 500 if f.default is None else f.default
    return number + (64 if f.name == "flush_every" else 2)


@pytest.mark.parametrize(("name", "f", "condition"), conditions())
def test_it_is_refused_by_what_makes_it_count(name: str, f: Field[Any], condition: str) -> None:
    given = broken(name, condition)
    beside = {other: value for other, value in setting(name, condition).items() if other in NEEDED}
    with pytest.raises(PolicyError, match=f"{f.name} counts only with ") as refused:
        make_policy({"name": name, **beside, **given, f.name: another(f)})
    assert refused.value.argument == f.name
    assert any(each in str(refused.value) for each in f.metadata["only_if"])


@pytest.mark.parametrize(("name", "f", "condition"), conditions())
def test_it_changes_nothing_there(name: str, f: Field[Any], condition: str) -> None:
    """Neither when events are due, nor what is logged, nor what they keep."""
    given = setting(name, condition)
    without, with_it = (
        policy_class(name)(**args).for_model(LAYERS, 16)
        for args in (given, {**given, f.name: another(f)})
    )
    assert behaviour(without) == behaviour(with_it)


def behaviour(policy: Policy) -> list[Any]:
    torch.manual_seed(0)
    reduction = policy.query_reduction or policy.recomputed_reduction
    heads = KV_HEADS * (GROUP if reduction == "heads" else 1)
    window = max(policy.event_trigger.num_queries, policy.protected)
    queries = torch.randn(1, LAYERS, heads, window, DIM)
    keys, values = torch.randn(2, 1, LAYERS, KV_HEADS, ENTRIES, DIM)
    obs = Observation(queries, keys, 0.4, values=values)
    known: list[Any] = [
        policy.event_kind,
        reduction,
        policy.logged_dtype if policy.query_reduction else None,
    ]
    if isinstance(policy.event_trigger, Pruned):
        trigger, layer = policy.event_trigger, Observation(queries[:, :1], obs.keys[:, :1], 0.4)
        known += [trigger.prompt_lengths(at, LAYERS) for at in (20, 60, 200)]
        known += [trigger.kept_of_period(LAYERS), trigger.prunes(torch.arange(200).numpy()).sum()]
        known += [policy.survivors(layer, trigger.prompt_lengths(ENTRIES, LAYERS)[1]).tolist()]
    else:
        known += [policy.event_trigger]
    if policy.name == "kara":  # a window's older tokens are scored
        span = policy.window - policy.buffer  # type: ignore[attr-defined]
        own = Observation(queries, keys[..., :span, :], 0.4, values=values[..., :span, :])
        scores = policy.score(own)
        return [*known, policy.select(scores, span, policy.keep).tolist()]  # type: ignore[attr-defined]
    scores = policy.score(obs)
    kept = policy.choose(scores, ENTRIES, BUDGET)
    there = torch.arange(kept.indices.shape[-1]) < kept.counts[..., None]
    return [*known, kept.counts.tolist(), kept.indices.masked_fill(~there, -1).tolist()]


@pytest.mark.parametrize(
    ("spec", "field", "named"),
    [
        ({"name": "kara", "max_chunk": 6}, "max_chunk", "chunk_budget above 0"),
        ({"name": "kara", "chunk_budget": 5}, "chunk_budget", "at least 6"),
        ({"name": "kara", "chunk_budget": 7, "max_chunk": 10}, "chunk_budget", "at least 8"),
        (
            {"name": "kara", "preset": "paper", "query_dtype": "fp8"},
            "query_dtype",
            "query_source log",
        ),
        (
            {"name": "adakv", "budget": 40, "scorer": {"name": "pyramidkv", "exact_total": True},
             "trigger": "threshold"},
            "exact_total",
            "trigger prefill",
        ),
        (
            {"name": "adakv", "budget": 40, "scorer": {"name": "rkv", "remainder": "mean"}},
            "scorer",
            "remainder",
        ),
        (
            {"name": "windowkv", "budget": 50, "task": "aggregation", "window": 8, "best": 4},
            "task",
            "window and best",
        ),
        *(
            ({"name": name, "budget": 40, "protect_prompt": False}, "protect_prompt", "trigger thr")
            for name in ("snapkv", "pyramidkv", "chunkkv", "adakv")
        ),
        ({"name": "keydiff", "budget": 9, "protect_prompt": True}, "protect_prompt", "trigger thr"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)  # fmt: skip
def test_what_was_silent(spec: dict[str, Any], field: str, named: str) -> None:
    with pytest.raises(PolicyError, match=named) as refused:
        make_policy(spec)
    assert refused.value.argument == field


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "kara", "preset": "paper", "max_chunk": 6},  # which turns chunks on
        {"name": "kara", "preset": "paper", "query_reduce": "group_mean"},
        {
            "name": "kara",
            "preset": "paper",
            "query_reduce": "group_mean",
            "group_aggregate": "mean",
        },
        {"name": "adakv", "budget": 40, "pooling": "none"},  # over the 7 of its own default
        {"name": "adakv", "budget": 40, "kernel_size": 1},
        {"name": "snapkv", "budget": 40, "trigger": "prefill", "protect_prompt": True},
        {"name": "spindlekv", "ratio": "9/10", "score_norm": "age"},
    ],
    ids=str,
)
def test_presets_and_defaults_are_no_arguments(spec: dict[str, Any]) -> None:
    make_policy(spec)


def test_a_pyramid_of_one_group_has_no_shape() -> None:
    flat = {"name": "windowkv", "budget": 40, "reuse_layers": LAYERS}
    make_policy(flat).for_model(LAYERS, 16).for_model(LAYERS, 16)
    for more in ({"pyramid": 20}, {"rule": "equations"}):
        with pytest.raises(PolicyError, match="below the model's 4 layers"):
            make_policy({**flat, **more}).for_model(LAYERS, 16)
