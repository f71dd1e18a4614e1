"""Guesses that a step verifies, and what of them is confirmed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Drafts:
    """What n decoding rows compute in a step that verifies guesses: a chunk each, of its newest
    token and the tokens that are guessed to follow. ``lengths [n]`` count both."""

    lengths: IntArray
    token_ids: IntArray

    @property
    def starts(self) -> IntArray:
        """The first token of each chunk: [n]."""
        starts: IntArray = np.cumsum(self.lengths) - self.lengths
        return starts

    @property
    def num_guessed(self) -> int:
        return len(self.token_ids) - len(self.lengths)

    @property
    def guesses(self) -> IntArray:
        """What is guessed to follow each token; -1 behind the last one of a chunk: [T]."""
        guesses = np.append(self.token_ids[1:], -1)
        guesses[np.cumsum(self.lengths) - 1] = -1
        return guesses

    @property
    def behind(self) -> IntArray:
        """How many tokens of its chunk come after each token: [T]."""
        behind: IntArray = np.repeat(self.lengths, self.lengths) - 1 - ragged_arange(self.lengths)
        return behind

    def confirmed(self, sampled: IntArray) -> IntArray:
        """How many of the tokens ``sampled [T]`` each row gets: those up to the first that was not
        guessed."""
        missed = np.flatnonzero(sampled != self.guesses)
        confirmed: IntArray = missed[np.searchsorted(missed, self.starts)] - self.starts + 1
        return confirmed


@dataclass(frozen=True, slots=True)
class Confirmed:
    """What sequences get of a step with drafts: ``counts [S]`` tokens each, which are in the places
    ``at`` among all that was sampled."""

    counts: IntArray
    at: IntArray

    def owners(self, sequences: Iterable[T]) -> list[T]:
        """The one of ``sequences [S]`` that gets each token."""
        each = zip(sequences, self.counts.tolist(), strict=True)
        return [owner for owner, count in each for _ in range(count)]


def confirmed_of(drafts: Drafts, sampled: IntArray, stop_ids: np.ndarray[Any, Any]) -> Confirmed:
    """What is confirmed of the tokens ``sampled``: those of all chunks of ``drafts``, then one of
    each other sequence. ``stop_ids [n, .]`` end the sequence of each chunk."""
    in_drafts = sampled[: len(drafts.token_ids)]
    counts = drafts.confirmed(in_drafts)
    stops = (np.repeat(stop_ids, drafts.lengths, axis=0) == in_drafts[:, None]).any(axis=1)
    if stops.any():
        first = np.append(np.flatnonzero(stops), len(in_drafts))
        until = first[np.searchsorted(first, drafts.starts)] - drafts.starts + 1
        counts = np.minimum(counts, until)
    others = np.arange(len(in_drafts), len(sampled))
    at = np.repeat(drafts.starts, counts) + ragged_arange(counts)
    return Confirmed(np.concatenate([counts, np.ones_like(others)]), np.concatenate([at, others]))
