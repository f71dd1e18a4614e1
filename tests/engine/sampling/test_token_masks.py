"""Masks of grammars: bits on the host, unpacked for their own rows on the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvserve.engine.sampling.grammar import Matcher, SequenceGrammar, TokenMasks, allowed_bits
from tests.counting import lines_run

VOCABULARY = 128_256


class Only(Matcher):
    """A matcher that allows one token."""

    def __init__(self, token: int) -> None:
        self._token = token

    def fill(self, mask: np.ndarray[Any, Any]) -> None:
        mask[:] = 0
        mask.view(np.uint8)[self._token // 8] = 1 << self._token % 8

    def accept(self, token: int) -> bool:
        return token == self._token


def test_rows_without_a_grammar_stay_as_they_are() -> None:
    logits = torch.randn(4, 75)
    before = logits.clone()
    none = (None, None)
    grammars = [(at, SequenceGrammar(Only(token), none, ())) for at, token in ((3, 74), (0, 9))]
    bits = allowed_bits(grammars, 75)
    assert bits.shape == (2, 3) and bits.dtype == np.int32
    masked = TokenMasks.of([3, 0], bits, logits.device).apply(logits)
    expected = torch.full_like(logits, -torch.inf)
    expected[3, 74], expected[0, 9] = logits[3, 74], logits[0, 9]
    expected[1:3] = logits[1:3]
    assert torch.equal(masked, expected) and torch.equal(logits, before)


def test_the_host_makes_and_sends_a_bit_per_token_of_a_grammar() -> None:
    """However many other rows there are, and in no loop over the tokens."""
    grammars = [(200, SequenceGrammar(Only(5), (None, None), ()))]

    def make(vocabulary: int) -> None:
        bits = allowed_bits(grammars, vocabulary)
        masks = TokenMasks.of([200], bits, torch.device("cpu"))
        assert masks.bits.nbytes == bits.nbytes == vocabulary // 8

    make(VOCABULARY)
    assert lines_run(lambda: make(VOCABULARY)) == lines_run(lambda: make(64))
