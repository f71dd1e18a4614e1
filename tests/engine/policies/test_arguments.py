"""Arguments of policies: what is said of them, what they may be, alone and together."""

from __future__ import annotations

import json
import re
from dataclasses import Field, dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar

import pytest

from kvserve.engine.policies.base import PolicyError, argument
from kvserve.engine.policies.budgeted import BudgetedPolicy
from kvserve.engine.policies.parts import arguments, common
from kvserve.engine.policies.parts.arguments import MOST_TOKENS, counts_tokens, most_of, types_of
from kvserve.engine.policies.registry import (
    describe_policies,
    make_policy,
    policy_class,
    policy_names,
)
from kvserve.engine.policies.scoring import POOLINGS

DESCRIBED = {policy["name"]: policy for policy in describe_policies()}
WRONG: dict[str, list[Any]] = {
    "integer": [1.5, 64.0, "many", True],
    "number": ["many", True, float("nan")],
    "string": [3, ["sum"]],
    "boolean": ["perhaps", 2],
}


def needs(name: str) -> list[str]:
    """Fields of which one has to be given."""
    return [
        field
        for option in DESCRIBED[name]["schema"].get("anyOf", [])
        for field in option["required"]
    ]


def minimal(name: str) -> dict[str, Any]:
    """A policy with nothing but what it needs."""
    return {"name": name, **dict.fromkeys(needs(name)[:1], 100)}


def refused(name: str, field: str, value: Any) -> bool:
    """Whether a value is refused, by the field's name."""
    given = {"name": name} if field in needs(name) else minimal(name)
    try:
        make_policy({**given, field: value})
    except PolicyError as error:
        assert error.argument == field, f"{field}={value!r}: {error}"
        return True
    return False


@pytest.mark.parametrize("name", DESCRIBED)
def test_everything_is_said(name: str) -> None:
    policy = DESCRIBED[name]
    assert policy["summary"].endswith(".") and policy["cost"] and policy["avoid"]
    paper = re.search(r"\(arXiv \d{4}\.\d{5}\)$", policy["source"])
    assert paper or name == "none"
    assert all(argument["help"] for argument in policy["args"])
    assert policy["schema"]["additionalProperties"] is False
    json.dumps(policy)
    make_policy(minimal(name))


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_schema_tells_the_truth(name: str) -> None:
    for field, facts in DESCRIBED[name]["schema"]["properties"].items():
        if field == "name":
            continue
        assert facts["description"], field
        types = facts["type"] if isinstance(facts["type"], list) else [facts["type"]]
        if facts["default"] is not None:
            assert not refused(name, field, facts["default"]), field
        for value in facts.get("enum", []):
            assert field == "trigger" or not refused(name, field, value), (field, value)
        if "enum" in facts:
            assert refused(name, field, "no such choice"), field
        for value in WRONG[types[0]]:
            if not isinstance(value, str) or "string" not in types:
                assert refused(name, field, value), (field, value)
        for bound, beyond in (("minimum", -1), ("maximum", 1)):
            if bound in facts:
                assert refused(name, field, facts[bound] + beyond), (field, bound)


@pytest.mark.parametrize("name", [name for name in DESCRIBED if needs(name)])
def test_what_is_needed_is_needed(name: str) -> None:
    with pytest.raises(PolicyError, match="budget"):
        make_policy(name)


# ---- what one argument may be --------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "value", [True, False, None, [1], {"a": 1}, "many", "", ".", 0, 1.01, float("nan")]
)
def test_what_is_no_ratio_is_refused(value: Any) -> None:
    with pytest.raises(PolicyError) as error:
        make_policy({"name": "spindlekv", "ratio": value})
    assert error.value.argument == "ratio"


# ---- against a server's context -----------------------------------------------------------------


@EACH
def test_tokens_stay_below_the_context(name: str) -> None:
    """Checked field by field: what another one says to it does not matter here."""
    for f in numbers(name):
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


# ---- arguments that do not go together -----------------------------------------------------------

HELD = {"budget": 64}
NOT_SUMMED: list[tuple[str, Any]] = [
    *(("query_stride", 2), ("queries", "buffer")),
    *(("protect_prompt", False), ("protect_turns", True)),
]
"""With these Kara's scores cannot be added up."""
CASES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "kara": [
        *(({"window": 32, "buffer": 32}, "buffer"), ({"ratio": 0.5, "budget": 100}, "budget")),
        *(({"budget": 32}, "budget"), ({"budget": 513}, "budget"), ({"max_chunk": 2}, "max_chunk")),
        *(({"chunk_budget": 116}, "chunk_budget"), ({"query_stride": 65}, "query_stride")),
        ({"query_stride": 3}, "query_stride"),  # does not divide 512
        ({"query_stride": 5, "queries": "buffer"}, "query_stride"),
        ({"query_stride": 4, "buffer": 126}, "query_stride"),  # the buffer's queries score again
        ({"query_stride": 3, "buffer": 126, "queries": "buffer"}, "query_stride"),
        *(({"score_every": 48}, "score_every"), ({"score_every": 4}, "score_every")),
        ({"score_every": 32, "query_source": "recompute"}, "score_every"),
        *(({"score_every": 32, name: value}, "score_every") for name, value in NOT_SUMMED),
        ({"score_every": 32, "query_aggregate": "max"}, "query_aggregate"),
        ({"score_every": 32, "period": 16}, "period"),
        ({"score_every": 32, "rest_bits": 2.0}, "rest_bits"),
        *(({"queries": "buffer", "buffer": 0}, "queries"), ({"windov": 64}, "windov")),
        ({"preset": "paper", "query_source": "log"}, "query_source"),
        ({"preset": "paper", "protect_prompt": False}, "protect_prompt"),
        ({"query_source": "log_host"}, "query_source"),
    ],
    "snapkv": [
        *(({"budget": 32}, "budget"), ({**HELD, "window": 64}, "budget")),
        *(({**HELD, "kernel_size": 4}, "kernel_size"), ({"ratio": 1.01}, "ratio")),
    ],
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
        ({**HELD, "task": "auto"}, "task"),  # the paper's classifier was not released
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

for _name in ("kara", "snapkv", "rkv", "pyramidkv"):
    CASES[_name] += [
        ({"budget": 140, "query_dtype": "int4", "query_reduce": "group_mean"}, "query_dtype"),
        ({"budget": 140, "attention": "absolute", "query_dtype": "model"}, "attention"),
        ({"budget": 140, "attention": "absolute", "query_reduce": "group_mean"}, "attention"),
    ]
CASES["kara"].append(({"query_source": "recompute", "query_dtype": "int4"}, "query_dtype"))


@pytest.mark.parametrize("name", CASES)
def test_arguments_that_do_not_go_together_are_named(name: str) -> None:
    for given, at_fault in CASES[name]:
        with pytest.raises(PolicyError, match=at_fault) as error:
            make_policy({"name": name, **given})
        assert error.value.argument == at_fault, given


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


def test_absolute_attention_chooses_int4() -> None:
    for name in ("snapkv", "rkv"):
        assert make_policy({"name": name, **HELD, "attention": "absolute"}).logged_dtype == "int4"
        assert make_policy({"name": name, **HELD}).logged_dtype == "auto"


def test_scorers_may_be_a_name_or_an_object() -> None:
    schema = {policy["name"]: policy["schema"] for policy in describe_policies()}["adakv"]
    assert schema["properties"]["scorer"]["type"] == ["string", "object"]
