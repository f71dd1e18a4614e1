"""Log-probabilities of a prompt as arrays; the objects for callers are made when they are read.

A prompt of 4,000 tokens has 84,000 of them. As objects they take half a second of the event loop
and 300 bytes each, as arrays next to nothing and 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from kvserve.engine.messages import PromptLogprobs
from kvserve.outputs import Logprob

Entry = dict[int, Logprob] | None
_Array = np.ndarray[Any, Any]
_Columns = tuple[_Array, _Array, _Array, _Array, _Array]
"""Tokens, their log-probabilities and ranks: [N]; the likeliest tokens and theirs: [N, K]."""


class ScoredPrompt(Sequence[Entry]):
    """A map by token id for each prompt token, ``None`` for the first; grows with the prompt."""

    def __init__(self, text: Callable[[int], str]) -> None:
        self._text = text
        self._ends = [1]
        self._chunks: list[_Columns] = []

    def __len__(self) -> int:
        return self._ends[-1]

    def take(self, scored: PromptLogprobs) -> None:
        """Add a chunk. A prompt that was preempted is scored again: what is known is skipped."""
        new = len(self) - scored.start
        tokens = np.frombuffer(scored.token_ids, np.int32)
        shape = len(tokens), scored.count
        self._chunks.append(
            (
                tokens[new:],
                np.frombuffer(scored.logprobs, np.float32)[new:],
                np.frombuffer(scored.ranks, np.int32)[new:],
                np.frombuffer(scored.top_ids, np.int32).reshape(shape)[new:],
                np.frombuffer(scored.top_logprobs, np.float32).reshape(shape)[new:],
            )
        )
        self._ends.append(max(len(self), scored.start + len(tokens)))

    @overload
    def __getitem__(self, index: int) -> Entry: ...
    @overload
    def __getitem__(self, index: slice) -> list[Entry]: ...
    def __getitem__(self, index: int | slice) -> Entry | list[Entry]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        if at == 0:
            return None
        chunk = int(np.searchsorted(self._ends, at, side="right")) - 1
        first = at - self._ends[chunk]
        return next(self._entries(self._chunks[chunk], slice(first, first + 1)))

    def __iter__(self) -> Iterator[Entry]:
        yield None
        for chunk in self._chunks:
            yield from self._entries(chunk, slice(None))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def _entries(self, chunk: _Columns, rows: slice) -> Iterator[Entry]:
        text = self._text
        for token, logprob, rank, ids, others in zip(
            *(column[rows].tolist() for column in chunk), strict=True
        ):
            entry = {token: Logprob(logprob, rank, text(token))}
            for place, (other, value) in enumerate(zip(ids, others, strict=True), 1):
                if other != token:
                    entry[other] = Logprob(value, place, text(other))
            yield entry
