"""Kara's arguments and counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.policies.kara import Kara
from kvserve.engine.policies.registry import describe_policies, make_policy
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
    ("fields", "places"),
    [
        ({"window": 6}, [0, 1, 2, 3, 4, 5]),
        ({"window": 27, "buffer": 3, "query_stride": 3}, [2, 5, 8, 11, 14, 17, 20, 23, 26]),
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


def test_recomputed_queries_need_no_log() -> None:
    log, recompute = Kara(query_reduce="heads"), Kara(query_source="recompute")
    assert (log.query_reduction, log.recomputed_reduction) == ("heads", None)
    assert (recompute.query_reduction, recompute.recomputed_reduction) == (None, "heads")
    assert log.event_trigger.logs and not recompute.event_trigger.logs


def test_the_paper_preset_is_other_defaults_and_the_engine_s_schedule() -> None:
    paper = make_policy({"name": "kara", "preset": "paper"})
    trigger = paper.event_trigger
    assert isinstance(trigger, EngineWide)
    assert (trigger.window, trigger.buffer, trigger.keep) == (768, 32, 225)
    assert (trigger.period, trigger.most, trigger.logs) == (128, 30, False)
    assert paper.recomputed_reduction == "heads"
    smaller = make_policy({"name": "kara", "preset": "paper", "window": 128, "ratio": 0.25})
    assert smaller.event_trigger == EngineWide(window=128, buffer=32, keep=24, period=128, most=30)


def test_what_differs_from_the_paper_is_said_first() -> None:
    ours, paper = Kara(), Kara.presets["paper"]
    differing = [name for name, value in paper.items() if getattr(ours, name) != value]
    assert len(differing) == 9, "the words below say nine"
    (kara,) = [each for each in describe_policies() if each["name"] == "kara"]
    assert "nine defaults are not the paper's" in kara["summary"]
    page = (Path(__file__).parents[3] / "docs/choose-a-policy.md").read_text()
    assert "not the paper's Kara unless `preset=paper` is given: nine defaults differ" in page
