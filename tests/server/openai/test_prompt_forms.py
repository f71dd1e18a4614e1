"""The forms of ``prompt``, and how long the largest one takes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvserve.log import RequestError
from kvserve.server.openai.fields import _parse_prompt


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([-1, 2**31 - 1], [[-1, 2**31 - 1]]),  # the engine knows which ids there are
    ],
)
def test_forms(given: Any, prompts: list[Any]) -> None:
    assert _parse_prompt(given) == prompts


@pytest.mark.parametrize(
    "given",
    [
        *(None, 7, True, {}, 1.0, [1, "a"], ["a", 1], [1, True], [True], [1, 2.0], [1, None]),
        *([[1], "a"], [[1], [True]], [[[1]]], [1, 2**31], [1, -(2**31)], [[1], 2], ["a", None]),
    ],
)
def test_what_is_none(given: Any) -> None:
    with pytest.raises(RequestError, match="prompt must be a string"):
        _parse_prompt(given)


@pytest.mark.parametrize("given", ["", [], [""], [[]], [[1], []]])
def test_nothing(given: Any) -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        _parse_prompt(given)


def test_three_million_ids_stop_the_loop_for_a_moment() -> None:
    """It was .3 s of one core, for which /health waited too; the best of three is measured, since
    a busy machine takes half as long again."""
    ids, took = [1] * 3_000_000, list[float]()
    for _ in range(3):
        started = time.thread_time()
        assert _parse_prompt(ids) == [ids]
        took.append(time.thread_time() - started)
    assert min(took) < 0.25
