"""A prompt's log-probabilities as arrays read like a list of maps, however they arrived."""

from __future__ import annotations

import numpy as np

from kvserve.engine.frontend.scored_prompt import ScoredPrompt
from kvserve.engine.messages import PromptLogprobs
from kvserve.outputs import Logprob


def chunk(start: int, end: int) -> PromptLogprobs:
    """Token ``10 i`` at place ``i``, its rank ``i``; the likeliest are ``10 i`` and ``7``."""
    places = np.arange(start, end, dtype=np.int32)
    values = -places.astype(np.float32)
    top = np.stack([10 * places, np.full_like(places, 7)], axis=1)
    return PromptLogprobs(
        1,
        start,
        2,
        (10 * places).tobytes(),
        values.tobytes(),
        places.tobytes(),
        top.tobytes(),
        np.stack([values, values - 1], axis=1).astype(np.float32).tobytes(),
    )


def expected(place: int) -> dict[int, Logprob] | None:
    if place == 0:
        return None
    value = -float(place)
    return {10 * place: Logprob(value, place, f"<{10 * place}>"), 7: Logprob(value - 1, 2, "<7>")}


def test_chunks_read_like_a_list_of_maps() -> None:
    found = ScoredPrompt(lambda token: f"<{token}>")
    assert list(found) == [None]
    for start, end in ((1, 4), (1, 3), (2, 6), (6, 7)):  # preempted twice, scored again
        found.take(chunk(start, end))
    wanted = [expected(place) for place in range(7)]
    assert len(found) == 7 and found == wanted and list(found) == wanted
    assert [found[i] for i in range(7)] == wanted
    assert found[-1] == wanted[-1] and found[2:5] == wanted[2:5] and found[1:] == wanted[1:]
