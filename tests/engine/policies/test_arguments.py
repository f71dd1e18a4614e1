"""What policies refuse of arguments that do not go together: the argument is named.

What one argument may be by itself is in test_schema.py and test_bounds.py, for all policies.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import (
    describe_policies,
    make_policy,
    policy_class,
    policy_names,
)
from tests.engine.policies.test_schema import refused

NAN = float("nan")
HELD = {"budget": 64}
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "kara": [
        *(({"window": 32, "buffer": 32}, "buffer"), ({"ratio": 0.5, "budget": 100}, "budget")),
        *(({"budget": 32}, "budget"), ({"budget": 513}, "budget"), ({"max_chunk": 2}, "max_chunk")),
        *(({"chunk_budget": 116}, "chunk_budget"), ({"query_stride": 65}, "query_stride")),
        ({"query_stride": 3}, "query_stride"),  # does not divide 512
        ({"query_stride": 5, "queries": "buffer"}, "query_stride"),
        *(({"queries": "buffer", "buffer": 0}, "queries"), ({"windov": 64}, "windov")),
        ({"preset": "paper", "query_source": "log"}, "query_source"),
        ({"preset": "paper", "protect_prompt": False}, "protect_prompt"),
        ({"query_source": "log_host"}, "query_source"),
    ],
    "snapkv": [({"budget": 32}, "budget"), ({**HELD, "window": 64}, "budget")],
    "rkv": [
        *(({"budget": 8}, "budget"), ({**HELD, "window": 64}, "budget"), ({"ratio": 0.5}, "ratio")),
        ({**HELD, "threshold": 64}, "threshold"),
    ],
    "keydiff": [
        *(({"budget": 8, "recent": 8}, "budget"), ({"ratio": 0.5, "mode": "block"}, "ratio")),
        ({"budget": 8, "mode": "block", "protect_prompt": True}, "protect_prompt"),
    ],
    "chunkkv": [
        *(({"budget": 17}, "budget"), ({"budget": 30, "chunk_size": 23}, "budget")),
        ({"budget": 30, "window": 30}, "budget"),
        ({"budget": 30, "trigger": "threshold", "threshold": 39}, "threshold"),
    ],
    "streaming_llm": [
        *(({"budget": 4}, "budget"), ({"budget": 1, "sinks": 0}, "budget")),
        *(({"budget": 16, "period": 13}, "period"), ({"ratio": 0.5}, "ratio")),
    ],
    "pyramidkv": [({"budget": 8}, "budget"), ({**HELD, "window": 64}, "budget")],
    "dynamickv": [({"budget": 8}, "budget"), ({**HELD, "max_ratio": 0.9}, "max_ratio")],
    "windowkv": [
        *(({"budget": 32, "task": "aggregation"}, "budget"), ({"budget": 16}, "budget")),
        *(({**HELD, "best": 17}, "best"), ({**HELD, "ratio": 0.5}, "ratio")),
    ],
    "spindlekv": [({"codebook": 1}, "codebook"), ({"codebook": 2}, "codebook"), (HELD, "budget")],
    "adakv": [
        *(({"budget": 32}, "budget"), ({"budget": 8, "scorer": "rkv"}, "budget")),
        ({**HELD, "normalize": True, "scorer": "keydiff"}, "normalize"),
        ({**HELD, "scorer": {"name": "snapkv", "window": 9}, "window": 8}, "window"),
        *(
            ({**HELD, "scorer": "keydiff", "window": 8}, "window"),
            ({"ratio": 0.5, "scorer": "rkv"}, "ratio"),
        ),
        ({**HELD, "scorer": 3}, "scorer"),
        ({**HELD, "scorer": "snapkvv"}, "scorer"),
        ({**HELD, "scorer": {}}, "scorer"),
        *(
            ({**HELD, "scorer": {"name": name, **more}}, "scorer")
            for name, more in (
                *(("snapkv", {"windows": 3}), ("snapkv", {"scope": "all"})),
                *(("snapkv", {"budget": 3}), ("keydiff", {"mode": "block"})),
            )
        ),
        *(
            ({**HELD, "scorer": name}, "scorer")
            for name in ("none", "kara", "streaming_llm", "h2o", "chunkkv", "adakv", "windowkv")
        ),
    ],
    "pyramidinfer": [(HELD, "budget")],
    "triattention": [
        *(({"budget": 5, "ratio": 0.5}, "budget"), ({"budget": 3, "recent": 3}, "budget")),
    ],
}
for _name in ("snapkv", "keydiff", "chunkkv", "pyramidkv", "adakv"):
    CASES[_name] += [
        *(({**HELD, "ratio": 0.5}, "budget"), ({"ratio": 0.5, "trigger": "threshold"}, "ratio")),
        *(({**HELD, "threshold": 128}, "threshold"), ({**HELD, "when": "prefill"}, "when")),
        ({**HELD, "trigger": "threshold", "threshold": 64}, "threshold"),
    ]


@pytest.mark.parametrize("name", CASES)
def test_arguments_that_do_not_go_together_are_named(name: str) -> None:
    for given, argument in CASES[name]:
        with pytest.raises(PolicyError, match=argument) as error:
            make_policy({"name": name, **given})
        assert error.value.argument == argument, given


@pytest.mark.parametrize("name", policy_names())
def test_ratios_and_kernels_of_every_policy(name: str) -> None:
    names = {field.name for field in fields(policy_class(name))}
    for field, wrong in (("ratio", (0, 1.01, NAN, "many")), ("kernel_size", (0, 2, 4, True))):
        for value in wrong if field in names else ():
            assert refused(name, field, value), (field, value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "snapkv"}, r"an integer above window \(32\) \(or give ratio\), got None"),
        ({"name": "snapkv", **HELD, "trigers": "x"}, "did you mean trigger"),
        ({"name": "kara", "query_source": "log_host"}, "log_host.*not built"),
        ({"name": "cara"}, "none, kara"),
    ],
)
def test_messages_say_what_is_allowed(given: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make_policy(given)


def test_scorers_may_be_a_name_or_an_object() -> None:
    schema = {policy["name"]: policy["schema"] for policy in describe_policies()}["adakv"]
    assert schema["properties"]["scorer"]["type"] == ["string", "object"]
