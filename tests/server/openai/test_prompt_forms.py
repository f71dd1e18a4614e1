"""The forms of ``prompt``, and what the largest one costs."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.log import RequestError
from kvserve.server.openai.fields import _parse_prompt
from tests.counting import lines_run


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


def test_millions_of_ids_are_not_looked_at_one_by_one() -> None:
    """/health waits for as long: three million took .3 s of one core in a loop of Python's."""
    few, many = [1] * 3, [1] * 30_000
    assert _parse_prompt(many) == [many]
    assert lines_run(lambda: _parse_prompt(many)) == lines_run(lambda: _parse_prompt(few))
    lists = (
        lines_run(lambda: _parse_prompt([many, many])),
        lines_run(lambda: _parse_prompt([few, few])),
    )
    assert lists[0] == lists[1]
