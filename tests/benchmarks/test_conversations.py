"""Made-up agents: what is sent, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.benchmarks.commands.serving import kv_figures
from kvserve.benchmarks.datasets.conversations import Conversations, conversations
from kvserve.benchmarks.datasets.workload import Source
from kvserve.benchmarks.measuring.serving_client import Answer
from kvserve.log import ConfigError

OPTIONS: dict[str, Any] = {
    "system_len": 20,
    "question_len": 5,
    "min_turns": 3,
    "max_turns": 5,
    "min_tool_len": 7,
    "max_tool_len": 11,
    "answer_len": 4,
    "think_seconds": 0.5,
}


def make(**options: Any) -> Conversations:
    return conversations(Source(6, 1, 100, None, None, True, {**OPTIONS, **options}))


def test_each_prompt_begins_with_the_turn_before() -> None:
    made = make()
    systems = {tuple(asked[0][:20]) for asked in made.asked}
    assert len(systems) == 1 and len(made) == 6
    for index, asked in enumerate(made.asked):
        assert 3 <= len(asked) <= 5 and len(asked[0]) == 25
        assert all(7 <= len(new) <= 11 for new in asked[1:])
        answers: list[list[int]] = []
        known: list[int] = []
        while (prompt := made.prompt_after(index, answers)) is not None:
            assert prompt[: len(known)] == known
            assert prompt[len(known) :] == asked[len(answers)]
            answers.append([index] * 4)
            known = [*prompt, *answers[-1]]
        assert len(answers) == len(asked) == len(made.thinks[index])
        assert made.full_lengths()[index] == len(known) - 1
        assert made.thinks[index][0] == 0 and all(think > 0 for think in made.thinks[index][1:])
    assert make() == made and make(think_seconds=0).thinks[0][1:] == [0.0] * (
        len(made.asked[0]) - 1
    )


def test_wrong_bounds_are_named() -> None:
    with pytest.raises(ConfigError, match="--min-turns and --max-turns"):
        make(min_turns=6)
    with pytest.raises(ConfigError, match="--min-tool-len"):
        make(max_tool_len=6)


def test_later_turns_have_figures_of_their_own() -> None:
    answers = [
        Answer(0.0, prompt_len=30, ttft=1.0),
        Answer(2.0, prompt_len=45, ttft=0.2, turn=1, cached=33, kv={"logical_tokens": 48,
               "held_tokens": 24, "compactions": 1, "blocks_released": 2, "resumed_tokens": 33}),
        Answer(3.0, prompt_len=45, ttft=0.4, turn=1, cached=20),
        Answer(3.0, turn=1, error="gone"),
    ]  # fmt: skip
    figures = kv_figures(answers, [])
    assert figures["prompt_tokens_computed"] == 30 + 12 + 25 and figures["resumed_turns"] == 1
    assert figures["median_follow_up_ttft_ms"] == pytest.approx(300)
    assert "median_follow_up_ttft_ms" not in kv_figures(answers[:1], [])
