"""What every policy refuses, and how: the argument is named, and what it may be."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import describe_policies, make_policy

NAN = float("nan")
BUDGETED = ("snapkv", "keydiff", "chunkkv")
BUDGET_ONLY = ("rkv", "streaming_llm")
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "snapkv": [
        ({"budget": 32}, "budget"),
        ({"budget": 64, "window": 64}, "budget"),
        ({"budget": 64, "window": 0}, "window"),
        ({"budget": 64, "window": 8.0}, "window"),
        ({"budget": 64, "kernel_size": 4}, "kernel_size"),
        ({"budget": 64, "kernel_size": 0}, "kernel_size"),
        ({"budget": 64, "kernel_size": True}, "kernel_size"),
        ({"budget": 64, "pooling": "mean"}, "pooling"),
        ({"budget": 64, "gqa_reduce": "median"}, "gqa_reduce"),
        ({"budget": 64, "scope": "future"}, "scope"),
        ({"budget": 64, "query_reduce": "mean"}, "query_reduce"),
    ],
    "rkv": [
        ({"budget": 8}, "budget"),
        ({"budget": 64, "window": 64}, "budget"),
        ({"budget": 64, "window": -1}, "window"),
        ({"budget": 64, "threshold": 64}, "threshold"),
        ({"budget": 64, "mix_lambda": NAN}, "mix_lambda"),
        ({"budget": 64, "mix_lambda": 1.1}, "mix_lambda"),
        ({"budget": 64, "mix_lambda": "much"}, "mix_lambda"),
        ({"budget": 64, "similarity": NAN}, "similarity"),
        ({"budget": 64, "similarity": True}, "similarity"),
        ({"budget": 64, "kernel_size": 2}, "kernel_size"),
        ({"budget": 64, "pooling": "min"}, "pooling"),
        ({"budget": 64, "protect_prompt": "maybe"}, "protect_prompt"),
        ({"budget": 64, "query_reduce": "mean"}, "query_reduce"),
        ({"ratio": 0.5}, "ratio"),
    ],
    "keydiff": [
        ({"budget": 8, "recent": 8}, "budget"),
        ({"budget": 8, "recent": -1}, "recent"),
        ({"budget": 8, "mode": "twice"}, "mode"),
        ({"budget": 8, "block": 0}, "block"),
        ({"ratio": 0.5, "mode": "block"}, "ratio"),
        ({"budget": 8, "mode": "block", "protect_prompt": True}, "protect_prompt"),
    ],
    "chunkkv": [
        ({"budget": 17}, "budget"),
        ({"budget": 30, "chunk_size": 23}, "budget"),
        ({"budget": 30, "window": 30}, "budget"),
        ({"budget": 30, "chunk_size": 0}, "chunk_size"),
        ({"budget": 30, "window": 0}, "window"),
        ({"budget": 30, "reuse_layers": 0}, "reuse_layers"),
        ({"budget": 30, "head_mode": "q_head"}, "head_mode"),
        ({"budget": 30, "chunk_reduce": "max"}, "chunk_reduce"),
        ({"budget": 30, "pooling": "avg5"}, "pooling"),
        ({"budget": 30, "kernel_size": 6}, "kernel_size"),
        ({"budget": 30, "query_reduce": "mean"}, "query_reduce"),
        ({"budget": 30, "trigger": "threshold", "threshold": 39}, "threshold"),
    ],
    "streaming_llm": [
        ({"budget": 4}, "budget"),
        ({"budget": 1, "sinks": 0}, "budget"),
        ({"budget": 16, "sinks": -1}, "sinks"),
        ({"budget": 16, "period": 0}, "period"),
        ({"budget": 16, "period": 13}, "period"),
        ({"ratio": 0.5}, "ratio"),
    ],
}
for _name in (*BUDGETED, *BUDGET_ONLY):
    CASES[_name] += [
        ({}, "budget"),
        ({"budget": 0}, "budget"),
        ({"budget": -5}, "budget"),
        ({"budget": NAN}, "budget"),
        ({"budget": 64.0}, "budget"),
        ({"budget": True}, "budget"),
    ]
for _name in BUDGETED:
    CASES[_name] += [
        ({"budget": 64, "ratio": 0.5}, "budget"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.5}, "ratio"),
        ({"ratio": NAN}, "ratio"),
        ({"ratio": 0.5, "trigger": "threshold"}, "ratio"),
        ({"budget": 64, "trigger": "sometimes"}, "trigger"),
        ({"budget": 64, "threshold": 128}, "threshold"),
        ({"budget": 64, "trigger": "threshold", "threshold": 64}, "threshold"),
        ({"budget": 64, "trigger": "threshold", "threshold": NAN}, "threshold"),
        ({"budget": 64, "protect_prompt": 2}, "protect_prompt"),
        ({"budget": 64, "when": "prefill"}, "when"),
    ]


@pytest.mark.parametrize("name", CASES)
def test_bad_arguments_are_named(name: str) -> None:
    for fields, argument in CASES[name]:
        with pytest.raises(PolicyError, match=argument) as refused:
            make_policy({"name": name, **fields})
        assert refused.value.argument == argument, fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "snapkv"}, r"an integer above window \(32\) \(or give ratio\), got None"),
        ({"name": "rkv", "budget": 8}, r"budget must be an integer above window \(8\), got 8"),
        ({"name": "snapkv", "budget": 64, "pooling": "min"}, "none or avg or max, got 'min'"),
        ({"name": "rkv", "budget": 9, "mix_lambda": 2}, r"a number in \[0, 1\], got 2"),
        ({"name": "snapkv", "budget": 64, "trigers": "x"}, "did you mean trigger"),
    ],
)
def test_messages_say_what_is_allowed(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make_policy(fields)


def test_the_trigger_field_goes_by_its_own_name() -> None:
    described = {policy["name"]: policy["args"] for policy in describe_policies()}
    for name in BUDGETED:
        assert "trigger" in [argument["name"] for argument in described[name]]
