"""Settings of a wrong type are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvserve import SamplingParams
from kvserve.log import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("top_p", None),
        ("n", "2"),
        ("max_tokens", "many"),
        ("max_tokens", 1.5),
        ("seed", "x"),
        ("logprobs", [1]),
        ("stop", 5),
        ("stop", [5]),
        ("stop_token_ids", 7),
        ("allowed_token_ids", ["a"]),
        ("bad_words", [1]),
        ("logit_bias", "x"),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "b"}),
        ("client", 7),
    ],
)
def test_the_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{field} must be") as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_numbers_of_numpy_are_numbers() -> None:
    given: dict[str, Any] = {"temperature": np.float32(0.5), "top_k": np.int64(3)}
    SamplingParams(**given, stop_token_ids=list(np.array([1, 2])))
