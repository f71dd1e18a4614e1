"""Masks of grammars: bits on the host, unpacked for their own rows on the device."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from kvserve.engine.sampling.grammar import SequenceGrammar, allowed_bits
from kvserve.engine.sampling.token_masks import TokenMasks

VOCABULARY = 128_256


class Only:
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
    """In under a millisecond, however many other rows there are: its best of ten."""
    grammars = [(200, SequenceGrammar(Only(5), (None, None), ()))]
    times = []
    for _ in range(10):
        began = time.perf_counter()
        bits = allowed_bits(grammars, VOCABULARY)
        masks = TokenMasks.of([200], bits, torch.device("cpu"))
        times.append(time.perf_counter() - began)
    assert masks.bits.nbytes == bits.nbytes == VOCABULARY // 8
    assert min(times) < 1e-3
