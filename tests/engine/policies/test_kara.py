"""Kara's arguments and counts."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.kara import Kara
from kvserve.engine.policies.registry import describe_policies, make_policy, policy_names
from kvserve.scheduler.triggers.periodic import EngineWide


@pytest.mark.parametrize(
    ("fields", "compressible", "keep"),
    [
        ({"window": 256, "ratio": 0.2}, 192, 39),
        ({"window": 384, "buffer": 32, "ratio": 0.2}, 352, 71),
        ({}, 384, 116),
        ({"window": 512, "buffer": 64, "ratio": 0.4, "chunk_budget": 32}, 448, 180),
        ({"window": 768, "buffer": 32, "budget": 257}, 736, 225),
        ({"window": 400, "buffer": 0, "ratio": 0.07}, 400, 28),  # 29 in binary floats
        ({"window": 110, "buffer": 10, "ratio": "3/10"}, 100, 30),
    ],
)
def test_counts_are_exact(fields: dict[str, Any], compressible: int, keep: int) -> None:
    policy = Kara(**fields)
    assert (policy.window - policy.buffer, policy.keep) == (compressible, keep)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"window": 0}, "window"),
        ({"window": 64.5}, "window"),
        ({"window": True}, "window"),
        ({"window": 32, "buffer": 32}, "buffer"),
        ({"buffer": -1}, "buffer"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 1.01}, "ratio"),
        ({"ratio": "many"}, "ratio"),
        ({"ratio": float("nan")}, "ratio"),
        ({"ratio": 0.5, "budget": 100}, "budget"),
        ({"budget": 32}, "budget"),
        ({"budget": 513}, "budget"),
        ({"period": 0}, "period"),
        ({"max_chunk": 2}, "max_chunk"),
        ({"chunk_budget": 144}, "chunk_budget"),
        ({"query_reduce": "mean"}, "query_reduce"),
        ({"query_aggregate": "median"}, "query_aggregate"),
        ({"query_source": "log_host"}, "query_source"),
        ({"query_dtype": "fp4"}, "query_dtype"),
        ({"query_stride": 0}, "query_stride"),
        ({"query_stride": 65}, "query_stride"),
        ({"query_stride": 3}, "query_stride"),  # does not divide 512
        ({"query_stride": 5, "queries": "buffer"}, "query_stride"),
        ({"queries": "prompt"}, "queries"),
        ({"queries": "buffer", "buffer": 0}, "queries"),
        ({"protect_prompt": 1}, "protect_prompt"),
        ({"protect_prompt": "no"}, "protect_prompt"),
        ({"windov": 64}, "windov"),
        ({"preset": "letter"}, "preset"),
        ({"preset": "paper", "query_source": "log"}, "query_source"),
        ({"preset": "paper", "protect_prompt": False}, "protect_prompt"),
    ],
)
def test_bad_arguments_are_named(fields: dict[str, Any], argument: str) -> None:
    with pytest.raises(PolicyError, match=argument) as refused:
        make_policy({"name": "kara", **fields})
    assert refused.value.argument == argument


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"window": 6}, [0, 1, 2, 3, 4, 5]),
        ({"window": 27, "query_stride": 3}, [2, 5, 8, 11, 14, 17, 20, 23, 26]),
        ({"window": 9, "buffer": 3, "queries": "buffer"}, [6, 7, 8]),
        (
            {"window": 40, "buffer": 18, "queries": "buffer", "query_stride": 2},
            [23, 25, 27, 29, 31, 33, 35, 37, 39],
        ),
    ],
)
def test_the_last_query_always_scores(fields: dict[str, Any], places: list[int]) -> None:
    policy = Kara(**{"buffer": 2, "chunk_budget": 0, **fields})
    assert list(policy.query_places(policy.window)) == places


def test_what_is_not_built_is_said() -> None:
    for fields, reason in (({"query_source": "log_host"}, "log_host.*not built"),):
        with pytest.raises(PolicyError, match=reason):
            make_policy({"name": "kara", **fields})


def test_recomputed_queries_need_no_log() -> None:
    log, recompute = Kara(query_reduce="heads"), Kara(query_source="recompute")
    assert (log.query_reduction, log.recomputed_reduction) == ("heads", None)
    assert (recompute.query_reduction, recompute.recomputed_reduction) == (None, "heads")
    assert log.event_trigger.logs and not recompute.event_trigger.logs


def test_unknown_policy_lists_the_known_ones() -> None:
    with pytest.raises(PolicyError, match="none, kara"):
        make_policy("cara")


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(PolicyError, match="did you mean window"):
        make_policy({"name": "kara", "windows": 64})


def test_descriptions_cover_every_argument() -> None:
    assert [policy["name"] for policy in describe_policies()] == policy_names()
    for policy in describe_policies():
        assert policy["summary"]
        assert all(argument["help"] for argument in policy["args"])


def test_the_paper_preset_is_other_defaults_and_the_engine_s_schedule() -> None:
    paper = make_policy({"name": "kara", "preset": "paper"})
    trigger = paper.event_trigger
    assert isinstance(trigger, EngineWide)
    assert (trigger.window, trigger.buffer, trigger.keep) == (768, 32, 225)
    assert (trigger.period, trigger.most, trigger.logs) == (128, 30, False)
    assert paper.recomputed_reduction == "heads"
    smaller = make_policy({"name": "kara", "preset": "paper", "window": 128, "ratio": 0.25})
    assert smaller.event_trigger == EngineWide(window=128, buffer=32, keep=24, period=128, most=30)
