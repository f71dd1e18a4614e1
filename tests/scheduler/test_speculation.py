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


def played(
    chance: float, cost: float, rows: int, tokens: int = 2_000, at_all: float = 0.0
) -> float:
    """Tokens per second over those without guesses: each is right with this chance, and adds this
    part of a plain step's time; the first of a step adds ``at_all``, too."""
    rng, costs = np.random.default_rng(1), DraftCosts(5)
    settings = NgramSettings(5, 1, 1)
    drafters = [Drafter(settings, 2 / 3) for _ in range(rows)]
    for drafter in drafters:
        drafter._index = Always()  # type: ignore[assignment]
    text: IntArray = (rng.random(2 * tokens) >= chance).astype(np.int32)
    made, wanted = np.zeros(rows), 0.0
    while made.min() < tokens:
        least, right = costs.least_chance(rows), np.zeros(rows, int)
        guesses, expected = np.zeros(rows, int), 0.0
        for row, drafter in enumerate(drafters):
            known = text[: int(made[row]) + 8]
            if least >= 1.0 or len(known) < drafter.ask_at:
                continue
            guesses[row] = len(drafter.draft(known, 5, least, rows))
            expected += drafter.expected(int(guesses[row]))
        guessed = int(guesses.sum())
        if guessed and not costs.gains(rows, expected, guessed):
            guessed = 0
        for row in np.flatnonzero(guesses).tolist() if guessed else []:
            misses = np.flatnonzero(rng.random(guesses[row]) >= chance)
            right[row] = misses[0] if len(misses) else guesses[row]
            drafters[row].learn(int(guesses[row]), int(right[row]))
        took = 1 + cost * guessed / rows + at_all * (guessed > 0)
        wanted += took
        took *= rng.uniform(0.9, 1.1) * (3 if rng.random() < 0.1 else 1)  # others use the machine
        if guessed or costs.measures(rows):
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


@pytest.mark.parametrize("chance", [0.3, 0.6, 1.0])
def test_steps_with_guesses_that_cost_something_at_all(chance: float) -> None:
    """Half of a plain step, and little by guess: many guesses pay, and a few do not."""
    gain = played(chance, 0.05, 16, 1_000, at_all=0.5)
    assert gain > (2 if chance == 1.0 else 0.95)


def test_few_guesses_among_many_rows_do_not_pay() -> None:
    """A step with guesses loses three tokens, and half of one by guess."""
    costs = DraftCosts(5)
    for i in range(20):
        costs.record(16, 0, 16, 1.0)
        guessed = 20 + i
        costs.record(16, guessed, 16 + guessed, 1 + (3 + guessed / 2) / 48)
    assert 0.2 <= costs.least_chance(16) < 1.0
    assert costs.gains(16, 30.0, 32)
    assert not costs.gains(16, 3.9, 4)
    rests = [0]
    for _ in range(120):
        if costs.least_chance(16) == NEVER:
            rests[-1] += 1
        elif not costs.gains(16, 3.9, 4):
            rests.append(0)
    assert rests[:6] == [1, 2, 4, 8, 16, 16]


def test_what_was_thought_to_pay_and_did_not_rests() -> None:
    """Chances that are taken too high: each pause is longer than the one before."""
    costs, pauses, last = DraftCosts(5), [0], NEVER
    for _ in range(4_000):
        least = costs.least_chance(4)
        if least == NEVER:
            costs.record(4, 0, 4, 1.0)
            pauses[-1] += 1
        else:
            costs.record(4, 8, 5, 1.5)  # one of eight is right
            pauses.append(0)
        last = least
    assert last == NEVER
    longest = [pause for pause in pauses if pause >= 128]
    assert longest[:3] == sorted(longest[:3]) and longest[2] >= 512


def test_what_is_not_found_is_looked_up_less_often() -> None:
    """The more sequences share a step, the less: beside all their lookups it is short."""
    text: IntArray = np.arange(400, dtype=np.int32)
    asked = []
    for rows in (1, 16, 64):
        drafter, count = Drafter(NgramSettings(5, 5, 5), 2 / 3), 0
        for size in range(8, 400):
            if size >= drafter.ask_at:
                assert not drafter.draft(text[:size], 5, 0.3, rows)
                count += 1
        asked.append(count)
    assert 90 < asked[0] < 110 and asked[1] < 45 and asked[2] < 35


def test_guesses_that_seemed_slow_are_tried_again() -> None:
    """The first steps with guesses were disturbed; later it is known what they cost."""
    costs = DraftCosts(5)
    for _ in range(8):
        costs.record(1, 5, 6, 1.0)
        costs.record(1, 0, 1, 0.01)
    assert costs.least_chance(1) > 1.0
    for _ in range(60 * 130):
        drafts = costs.least_chance(1) < 1.0
        costs.record(1, 5 * drafts, 1 + 5 * drafts, 0.012 if drafts else 0.01)
    assert costs.least_chance(1) < 0.5


def test_a_few_of_the_steps_that_rest_are_measured() -> None:
    costs = DraftCosts(5)
    for _ in range(8):
        costs.record(4, 8, 4, 3.0)
        costs.record(4, 0, 4, 1.0)
    measured = 0
    for _ in range(90):
        assert costs.least_chance(4) == NEVER
        measured += costs.measures(4)
    assert 10 <= measured <= 20


def test_nothing_is_guessed_while_nothing_is_measured() -> None:
    """Steps with prompts in them are not measured."""
    costs = DraftCosts(5)
    asked = [costs.least_chance(4) for _ in range(100)]
    assert asked[0] < 0.5 and asked[-1] == NEVER
    costs.record(4, 0, 4, 0.01)
    assert costs.least_chance(4) < 0.5
