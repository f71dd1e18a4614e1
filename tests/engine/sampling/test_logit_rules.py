"""Penalties, biases and bans, against loops over one row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kvserve.engine.messages import NewSequence
from kvserve.engine.sampling.logit_rules import LogitRules, RowRules
from kvserve.scheduler.messages.output import NewRequest

VOCAB = 12
NOTHING = NewSequence(0, "", [], 1, [], 1.0, 1.0, 0, 0.0, None, 0, 0, None, None)
CASES: list[dict[str, Any]] = [
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 1.8},
    {"logit_bias": {3: 5.0, 4: -100.0}},
    {"allowed_token_ids": [1, 2, 5, 1]},
    {"bad_words": [[3], [4, 5], [5, 5, 6]]},
    {
        **{"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 0.5},
        **{"logit_bias": {7: 2.0}, "allowed_token_ids": [1, 3, 5, 6, 7, 8]},
        **{"bad_words": [[5, 6], [8]]},
    },
]


def naive(logits: Sequence[float], prompt: list[int], output: list[int], r: NewSequence) -> Any:
    out = []
    for token, value in enumerate(logits):
        if token in prompt + output:
            repetition = r.repetition_penalty
            value = value / repetition if value > 0 else value * repetition
        value -= r.frequency_penalty * output.count(token)
        value -= r.presence_penalty * (token in output)
        value += r.logit_bias.get(token, 0.0)
        banned = any(
            word[-1] == token and output[len(output) - len(word) + 1 :] == list(word[:-1])
            for word in r.bad_words
            if len(word) <= len(output) + 1
        )
        allowed = not r.allowed_token_ids or token in r.allowed_token_ids
        out.append(value if allowed and not banned else -float("inf"))
    return torch.tensor(out)


def sequence(row: int, prompt: list[int], output: list[int]) -> NewRequest:
    tokens = np.array(prompt + output, np.int32)
    return NewRequest(row, row, len(prompt), tokens, (), None)


def check(rules: LogitRules, rows: list[tuple[int, list[int], list[int], NewSequence]]) -> None:
    logits = torch.randn(len(rows), VOCAB)
    before = logits.clone()
    found = rules.apply(logits, np.array([row for row, *_ in rows]))
    for i, (_, prompt, output, r) in enumerate(rows):
        torch.testing.assert_close(found[i], naive(before[i].tolist(), prompt, output, r))
    assert torch.equal(logits, before), "log-probabilities are taken from these"


def test_rules_equal_a_loop_while_rows_grow_move_and_leave() -> None:
    rules = LogitRules(10, VOCAB, "cpu")
    rng = np.random.default_rng(3)
    rows = []
    for row, case in enumerate([{}, *CASES]):
        prompt, output = ([int(t) for t in rng.integers(0, VOCAB, n)] for n in (4, 3))
        wanted = replace(NOTHING, **case)
        rules.set_row(sequence(row, prompt, output), RowRules.of(wanted))
        rows.append((row, prompt, output, wanted))
    for _ in range(12):
        check(rules, rows)
        tokens = rng.integers(3, 7, len(rows))
        rules.observe(torch.as_tensor(tokens), np.array([row for row, *_ in rows]))
        for (_, _, output, _), token in zip(rows, tokens, strict=True):
            output.append(int(token))
    rules.move_rows(np.array([2, 5]), np.array([5, 2]))
    rows[2], rows[5] = (5, *rows[2][1:]), (2, *rows[5][1:])
    check(rules, rows[1:4])
    presence = replace(NOTHING, presence_penalty=1.0)
    # A newcomer takes a row over: nothing of the old one is left.
    rules.set_row(sequence(3, [1], []), RowRules.of(presence))
    check(rules, [(3, [1], [], presence)])


def test_a_slot_is_used_again() -> None:
    rules = LogitRules(4, VOCAB, "cpu")
    for _ in range(50):
        presence = RowRules.of(replace(NOTHING, presence_penalty=1.0))
        rules.set_row(sequence(1, [1], [2]), presence)
        rules.set_row(sequence(1, [1], [2]), None)
    assert len(rules._settings) == 2


@pytest.mark.parametrize("words", [[[3, 4]], [[9], [1, 2, 3]]])
def test_longer_words_of_a_later_row_leave_earlier_rows_alone(words: Any) -> None:
    rules = LogitRules(4, VOCAB, "cpu")
    first, second = (replace(NOTHING, bad_words=each) for each in ([[5, 6]], words))
    rules.set_row(sequence(0, [1], [5]), RowRules.of(first))
    rules.set_row(sequence(1, [1], [1, 2]), RowRules.of(second))
    check(rules, [(0, [1], [5], first), (1, [1], [1, 2], second)])
