"""What the uneven policies refuse: the argument is named."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import describe_policies, make_policy
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.trigger import AtPrefillEnd, WhenOver
from tests.engine.policies.uneven.choices import UNEVEN

NAN = float("nan")
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "pyramidkv": [
        ({"budget": 8}, "budget"),
        ({"budget": 64, "ratio": 0.5}, "budget"),
        ({"budget": 64, "beta": 0}, "beta"),
        ({"budget": 64, "beta": 1.5}, "beta"),
        ({"budget": 64, "exact_total": 2}, "exact_total"),
        ({"budget": 64, "window": 64}, "budget"),
        ({"budget": 64, "kernel_size": 2}, "kernel_size"),
        ({"budget": 64, "trigger": "threshold", "threshold": 64}, "threshold"),
        ({"ratio": 0.5, "trigger": "threshold"}, "ratio"),
    ],
    "dynamickv": [
        ({"budget": 8}, "budget"),
        ({"budget": 64, "ratio": 0.5}, "budget"),
        ({"ratio": 1.5}, "ratio"),
        ({"budget": 64, "window": 0}, "window"),
        ({"budget": 64, "max_ratio": 0.9}, "max_ratio"),
        ({"budget": 64, "max_ratio": NAN}, "max_ratio"),
        ({"budget": 64, "interval": 0}, "interval"),
        ({"budget": 64, "pooling": "none"}, "pooling"),
        ({"budget": 64, "gqa_reduce": "none"}, "gqa_reduce"),
        ({"budget": 64, "kernel_size": 4}, "kernel_size"),
        ({"budget": 64, "rounding": "nearest"}, "rounding"),
        ({"budget": 64, "trigger": "threshold"}, "trigger"),
    ],
    "windowkv": [
        ({"budget": 32, "task": "aggregation"}, "budget"),
        ({"budget": 16}, "budget"),
        ({"budget": 64, "ratio": 0.5}, "ratio"),
        ({"budget": 64, "task": "qa"}, "task"),
        ({"budget": 64, "window": 0}, "window"),
        ({"budget": 64, "chunk_size": 0}, "chunk_size"),
        ({"budget": 64, "best": 0}, "best"),
        ({"budget": 64, "best": 17}, "best"),
        ({"budget": 64, "reuse_layers": 0}, "reuse_layers"),
        ({"budget": 64, "pyramid": 0}, "pyramid"),
        ({"budget": 64, "rule": "paper"}, "rule"),
    ],
    "spindlekv": [
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.01}, "ratio"),
        ({"ratio": NAN}, "ratio"),
        ({"beta": 1}, "beta"),
        ({"beta": -0.1}, "beta"),
        ({"beta": NAN}, "beta"),
        ({"window": 0}, "window"),
        ({"codebook": 1}, "codebook"),
        ({"codebook": 2}, "codebook"),
        ({"raw_fallback": "no"}, "raw_fallback"),
        ({"theta_k": 0}, "theta_k"),
        ({"theta_k": 1}, "theta_k"),
        ({"theta_v": NAN}, "theta_v"),
        ({"theta_v": -0.5}, "theta_v"),
        ({"flush_every": 0}, "flush_every"),
        ({"score_norm": "none"}, "score_norm"),
        ({"pooling": "min"}, "pooling"),
        ({"kernel_size": 4}, "kernel_size"),
        ({"budget": 64}, "budget"),
    ],
    "adakv": [
        ({"budget": 32}, "budget"),
        ({"budget": 8, "scorer": "rkv"}, "budget"),
        ({"budget": 64, "alpha": 1.2}, "alpha"),
        ({"budget": 64, "alpha": NAN}, "alpha"),
        ({"budget": 64, "floor": "soft"}, "floor"),
        ({"budget": 64, "normalize": 2}, "normalize"),
        ({"budget": 64, "exact_total": "yes"}, "exact_total"),
        ({"budget": 64, "normalize": True, "scorer": "keydiff"}, "normalize"),
        ({"budget": 64, "window": 0}, "window"),
        ({"budget": 64, "pooling": "min"}, "pooling"),
        ({"budget": 64, "scorer": 3}, "scorer"),
        ({"budget": 64, "scorer": "snapkvv"}, "scorer"),
        ({"budget": 64, "scorer": {}}, "scorer"),
        ({"budget": 64, "scorer": {"name": "snapkv", "windows": 3}}, "scorer"),
        ({"budget": 64, "scorer": {"name": "snapkv", "scope": "all"}}, "scorer"),
        ({"budget": 64, "scorer": {"name": "snapkv", "budget": 3}}, "scorer"),
        ({"budget": 64, "scorer": {"name": "keydiff", "mode": "block"}}, "scorer"),
        ({"budget": 64, "scorer": {"name": "snapkv", "window": 9}, "window": 8}, "window"),
        ({"budget": 64, "scorer": "keydiff", "window": 8}, "window"),
        ({"ratio": 0.5, "scorer": "rkv"}, "ratio"),
        *(
            ({"budget": 64, "scorer": name}, "scorer")
            for name in ("none", "kara", "streaming_llm", "h2o", "chunkkv", "adakv", "windowkv")
        ),
    ],
}
for _name in CASES.keys() - {"spindlekv"}:
    CASES[_name] += [
        ({}, "budget"),
        ({"budget": 0}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": True}, "budget"),
    ]
CASES["pyramidinfer"] = [
    ({"recent_ratio": 1}, "recent_ratio"),
    ({"recent_ratio": NAN}, "recent_ratio"),
    ({"min_context": -1}, "min_context"),
    ({"sinks": 1.5}, "sinks"),
    ({"decay": 1.1}, "decay"),
    ({"schedule": "steep"}, "schedule"),
    ({"interval": 0}, "interval"),
    ({"distance_weight": -1}, "distance_weight"),
    ({"period": 0}, "period"),
    ({"decode_ratio": 2}, "decode_ratio"),
    ({"decode_decay": True}, "decode_decay"),
    ({"query_reduce": "none"}, "query_reduce"),
    ({"budget": 64}, "budget"),
]


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_are_named(name: str) -> None:
    for fields, argument in CASES[name]:
        with pytest.raises(PolicyError, match=argument) as refused:
            make_policy({"name": name, **fields})
        assert refused.value.argument == argument, fields


def test_what_is_said_and_when_they_run() -> None:
    described = {policy["name"]: policy for policy in describe_policies()}
    for policy in UNEVEN:
        assert described[policy.name]["granularity"] == policy.granularity.value != "model"
        assert policy.granularity in (Granularity.LAYER, Granularity.HEAD)
    for name in ("pyramidkv", "adakv"):
        threshold = make_policy({"name": name, "budget": 64, "trigger": "threshold"}).event_trigger
        assert isinstance(threshold, WhenOver)
        assert (threshold.limit, threshold.keep) == (192, 64)
        prompt = make_policy({"name": name, "ratio": 0.5}).event_trigger
        assert isinstance(prompt, AtPrefillEnd)


def test_scorers_may_be_a_name_or_an_object() -> None:
    schema = {policy["name"]: policy["schema"] for policy in describe_policies()}["adakv"]
    assert schema["properties"]["scorer"]["type"] == ["string", "object"]
