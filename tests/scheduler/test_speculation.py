"""Guesses: where they come from, and when they are worth the time of a step."""

from __future__ import annotations

import numpy as np
import pytest

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.drafts import Drafts, confirmed_of
from kvserve.scheduler.speculation.draft_costs import NEVER, DraftCosts
from kvserve.scheduler.speculation.drafter import Drafter
from kvserve.scheduler.speculation.ngram_index import NgramIndex, NgramSettings


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


class Always:
    """In the place of an index: always guesses the token 0."""

    def extend(self, token_ids: IntArray) -> None:
        pass

    def guess(self, token_ids: IntArray, count: int) -> list[int]:
        return [0] * count


def played(chance: float, cost: float, rows: int, tokens: int = 2_000) -> float:
    """Tokens per second over those without guesses: each is right with this chance, and adds this
    part of a plain step's time."""
    rng, costs = np.random.default_rng(1), DraftCosts()
    settings = NgramSettings(5, 1, 1)
    drafters = [Drafter(settings, 2 / 3) for _ in range(rows)]
    for drafter in drafters:
        drafter._index = Always()  # type: ignore[assignment]
    text: IntArray = (rng.random(2 * tokens) >= chance).astype(np.int32)
    made, wanted = np.zeros(rows), 0.0
    while made.min() < tokens:
        least, right, guessed = costs.least_chance(rows), np.zeros(rows, int), 0
        for row, drafter in enumerate(drafters):
            known = text[: int(made[row]) + 8]
            if least >= 1.0 or len(known) < drafter.ask_at:
                continue
            guess = drafter.draft(known, 5, least)
            misses = np.flatnonzero(rng.random(len(guess)) >= chance)
            right[row] = misses[0] if len(misses) else len(guess)
            guessed += len(guess)
            if guess:
                drafter.learn(len(guess), int(right[row]))
        took = 1 + cost * guessed / rows
        wanted += took
        took *= rng.uniform(0.9, 1.1) * (3 if rng.random() < 0.1 else 1)  # others use the machine
        costs.record(rows, guessed, rows + int(right.sum()), took)
        made += 1 + right
    return float(made.mean() / wanted)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("cost", [0.02, 0.2, 0.6, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.05, 0.3, 0.6, 1.0])
def test_never_slower_than_without(chance: float, cost: float, rows: int) -> None:
    """By more than a twentieth; and much faster where guesses are right and cheap."""
    gain = played(chance, cost, rows, 1_000 if rows > 1 else 2_000)
    assert gain > 0.95
    if chance == 1.0 and cost <= 0.2:
        assert gain > 2.5
    elif chance == 1.0 and cost < 1.0:
        assert gain > 1.4
    elif chance == 0.6 and cost <= 0.2:
        assert gain > 1.2


def test_guesses_that_seemed_slow_are_tried_again() -> None:
    """The first steps with guesses were disturbed; later it is known what they cost."""
    costs = DraftCosts()
    for _ in range(8):
        costs.record(1, 5, 6, 1.0)
        costs.record(1, 0, 1, 0.01)
    assert costs.least_chance(1) > 1.0
    for _ in range(40 * 130):
        drafts = costs.least_chance(1) < 1.0
        costs.record(1, 5 * drafts, 1 + 5 * drafts, 0.012 if drafts else 0.01)
    assert costs.least_chance(1) < 0.5


def test_nothing_is_guessed_while_nothing_is_measured() -> None:
    """Steps with prompts in them are not measured."""
    costs = DraftCosts()
    asked = [costs.least_chance(4) for _ in range(100)]
    assert asked[0] < 0.5 and asked[-1] == NEVER
    costs.record(4, 0, 4, 0.01)
    assert costs.least_chance(4) < 0.5
