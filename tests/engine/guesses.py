"""Guesses that are right as often as a test wants: in the place of what looks tokens up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvserve import LLM
from kvserve.scheduler.arrays import IntArray

SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 5}
"""Settings of an engine that guesses."""
LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
"""Settings of one that looks up fewer tokens."""


def always_guess(llm: LLM) -> Any:
    """Let an engine guess at every step, whatever that costs; return its speculation."""
    speculation = llm.engine.core.scheduler.speculation
    assert speculation is not None
    speculation.enough = lambda rows: 0.0  # type: ignore[method-assign]
    return speculation


class Oracle:
    """Knows the answers: what each sequence generates without guesses."""

    def __init__(self, llm: LLM, answer: Callable[[int], Sequence[int]], right: float) -> None:
        """``answer`` of a sequence's id: its tokens behind the prompt. Each guess is right with
        the chance ``right``, whatever comes in front of it."""
        self._answer, self._right = answer, right
        self._rng = np.random.default_rng(0)
        self._scheduler = llm.engine.core.scheduler
        self.guessed = self.confirmed = 0
        self._llm = llm
        self.attach()

    def attach(self) -> None:
        """Guess for the engine as it is now: after a failure it starts over."""
        speculation = always_guess(self._llm)
        self._most = speculation._settings.num_tokens
        speculation._drafter = self._of_row

    def _of_row(self, row: int) -> OneRow:
        seq = self._scheduler.rows.owner(row)
        return OneRow(self, seq.num_prompt_tokens, self._answer(seq.seq_id))

    def guess(self, known: int, answer: Sequence[int]) -> list[int]:
        """Some tokens of the answer from ``known`` on."""
        tokens = list(answer[known : known + int(self._rng.integers(0, self._most + 1))])
        wrong = self._rng.random(len(tokens)) >= self._right
        return [
            3 + (token == 3) if bad else token for token, bad in zip(tokens, wrong, strict=True)
        ]


class OneRow:
    """An oracle's guesses for one row."""

    ask_at, share = 0, 1.0

    def __init__(self, oracle: Oracle, prompt: int, answer: Sequence[int]) -> None:
        self._oracle, self._prompt, self._answer = oracle, prompt, answer

    def look_up(self, token_ids: IntArray, *, verifies: bool) -> list[int]:
        return self._oracle.guess(len(token_ids) - self._prompt, self._answer)

    def learn(self, guessed: int, right: int) -> None:
        assert 0 <= right <= guessed
        self._oracle.guessed += guessed
        self._oracle.confirmed += right
