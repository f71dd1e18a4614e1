"""Guesses: where they come from, and when they are worth the time of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.drafts import Drafts, confirmed_of
from kvserve.scheduler.speculation.speculation import (
    Drafter,
    NgramIndex,
    NgramSettings,
    Speculation,
)
from kvserve.stats import EngineStats


def naive_guess(tokens: list[int], settings: NgramSettings, count: int) -> list[int]:
    """What followed the newest occurrence of the longest known end, again and again."""
    for length in range(settings.longest, settings.shortest - 1, -1):
        end = tokens[-length:]
        for last in range(len(tokens) - 2, length - 2, -1):
            if len(tokens) > length and tokens[last - length + 1 : last + 1] == end:
                known = tokens[last + 1 :]
                return (known * count)[:count]
    return []


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (2, 4), (5, 5)])
@pytest.mark.parametrize("words", [3, 40])
def test_the_index_finds_what_a_search_does(shortest: int, longest: int, words: int) -> None:
    """Token by token, in bulk, and both; collisions may lose an n-gram, and never invent one."""
    rng = np.random.default_rng(words)
    tokens: IntArray = rng.integers(0, words, 600).astype(np.int32)
    settings = NgramSettings(4, shortest, longest)
    index, lost, size, found = NgramIndex(settings), 0, 1, 0
    while size < len(tokens):
        known = tokens[:size]
        index.extend(known)
        expected = naive_guess(known.tolist(), settings, 4)
        guess = index.guess(known, 4)
        found += bool(guess)
        lost += guess != expected
        size += int(rng.choice([1, 2, 5, 70], p=[0.7, 0.2, 0.08, 0.02]))
    assert lost <= 0.2 * found


def test_confirmed_up_to_the_first_wrong_guess_or_stop() -> None:
    """Chunks of 4, 1, 3 and 2 tokens, then one token of a prompt that is complete."""
    drafts = Drafts(
        np.array([4, 1, 3, 2], np.int32), np.array([9, 1, 2, 3, 9, 9, 5, 6, 9, 8], np.int32)
    )
    sampled = np.array([1, 2, 7, 4, 0, 5, 6, 0, 3, 4, 42], np.int32)
    stops = np.array([[-1], [-1], [5], [-1]])
    found = confirmed_of(drafts, sampled, stops)
    assert found.counts.tolist() == [3, 1, 1, 1, 1]
    assert sampled[found.at].tolist() == [1, 2, 7, 0, 5, 3, 42]
    assert found.owners(list("abcde")) == [*"aaabcde"]
    assert drafts.num_guessed == 6 and drafts.behind.tolist() == [3, 2, 1, 0, 0, 2, 1, 0, 1, 0]


class Fixed:
    """In the place of an index: always guesses the token 0."""

    def extend(self, token_ids: IntArray) -> None:
        pass

    def guess(self, token_ids: IntArray, count: int) -> list[int]:
        return [0] * count


def speculation(most_rows: int = 4) -> Speculation:
    nobody: Any = None
    return Speculation(nobody, nobody, NgramSettings(5, 5, 5, most_rows), 64, EngineStats())


def played(chance: float, weights: float, rows: int, tokens: int = 2_000) -> float:
    """Tokens per second over those without guesses: each guess is right with this chance, and a
    step takes as long as reading ``weights``, in tokens, and as its own tokens."""
    rng, enough = np.random.default_rng(1), speculation().enough(rows)
    drafters = [Drafter(NgramSettings(5, 1, 1)) for _ in range(rows)]
    for drafter in drafters:
        drafter._index = Fixed()  # type: ignore[assignment]
    text: IntArray = (rng.random((rows, 2 * tokens)) >= chance).astype(np.int32)
    made, took = np.zeros(rows, int), 0.0
    while made.min() < tokens:
        computed = rows
        for row, drafter in enumerate(drafters if enough <= 1 else ()):
            verifies = drafter.share >= enough
            if made[row] + 8 < drafter.ask_at:
                continue
            guess = drafter.look_up(text[row, : made[row] + 8], verifies=verifies)
            if verifies:
                right = np.append(text[row, made[row] + 8 :][: len(guess)], 1).argmax()
                drafter.learn(len(guess), int(right))
                made[row] += right
                computed += len(guess)
        made += 1
        took += (weights + computed) / (weights + rows)
    return float(made.mean() / took)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 16])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8, 0.9, 1.0])
def test_guesses_never_lose_by_what_they_cost(chance: float, rows: int) -> None:
    """Among few rows they gain much where they are right; among many there are none."""
    for weights in (1.2, 3.4, 50.0):  # of an EPYC, of a Xeon, and large ones
        gain = played(chance, weights, rows)
        assert gain > 0.975, weights
        if rows > 4:
            assert gain == 1.0
        elif chance == 1.0:
            assert gain > (1.8 if rows == 1 else 1.2), weights


def test_what_a_row_must_have_guessed_right() -> None:
    """Half at least, and more the more rows share a step."""
    assert [round(speculation().enough(n), 2) for n in (1, 2, 3, 4)] == [0.6, 0.75, 0.82, 0.86]
    assert speculation().enough(5) > 1
    assert speculation(16).enough(2) == 0.5 and round(speculation(16).enough(16), 2) == 0.86


def test_the_newest_guesses_count() -> None:
    """Sixteen or more of them in whole chunks; a new row is taken to be half right."""
    drafter = Drafter(NgramSettings(5, 1, 1))
    assert drafter.share == 0.5
    drafter.learn(5, 5)
    assert drafter.share == 13 / 21
    for _ in range(3):
        drafter.learn(5, 1)
    assert drafter.share == 8 / 20
    drafter.learn(32, 16)
    assert drafter.share == 0.5


def test_a_row_that_stopped_goes_on_when_it_would_be_right() -> None:
    """What is not verified is compared with what follows."""
    text: IntArray = np.tile(np.arange(12, dtype=np.int32), 20)
    drafter = Drafter(NgramSettings(4, 2, 2))
    for _ in range(4):
        drafter.learn(4, 0)
    shares = []
    for size in range(20, 60):
        if size >= drafter.ask_at:
            assert len(drafter.look_up(text[:size], verifies=False)) == 4
            shares.append(drafter.share)
    assert shares[:6] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0] and len(shares) == 10


def test_what_is_not_found_is_looked_up_less_often() -> None:
    text: IntArray = np.arange(400, dtype=np.int32)
    drafter, asked = Drafter(NgramSettings(5, 5, 5)), 0
    for size in range(8, 400):
        if size >= drafter.ask_at:
            assert not drafter.look_up(text[:size], verifies=True)
            asked += 1
    assert 60 < asked < 80
