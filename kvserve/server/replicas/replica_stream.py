"""Sends a request's output from a replica to the server, in pieces that hold only what is new.

Also adds up the statistics of several engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

from kvserve.outputs import RequestOutput
from kvserve.stats import EngineStats

_OF_REQUEST = ("prompt_logprobs", "compactions")
_OF_CHOICE = ("text", "token_ids", "logprobs", "text_offsets", "kv_trace")
"""What grows from one output to the next."""


class OutputWriter:
    """The replica's end: cuts the growing output of one request into pieces."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._sent = Counter[tuple[int, str]]()
        """How much has been sent of what grows, by the choice (-1: the request) and name."""

    def take_new(self, output: RequestOutput) -> RequestOutput:
        """What came since the last piece, without the prompt."""
        choices = [
            replace(choice, **self._new(choice, _OF_CHOICE, choice.index))
            for choice in output.outputs
        ]
        new = self._new(output, _OF_REQUEST, -1)
        about: dict[str, Any] = {"prompt": None, "prompt_token_ids": [], "engine": self._engine}
        return replace(output, outputs=choices, **about, **new)

    def _new(self, grown: Any, names: Sequence[str], index: int) -> dict[str, Any]:
        found = {}
        for name in names:
            if (value := getattr(grown, name)) is not None:
                found[name] = value[self._sent[index, name] :]
                self._sent[index, name] = len(value)
        return found


class OutputReader:
    """The server's end: joins the pieces into one growing output."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self._prompt = prompt_token_ids
        self._output: RequestOutput | None = None

    def join(self, piece: RequestOutput) -> RequestOutput:
        whole, self._output = self._output, piece
        piece.prompt_token_ids = self._prompt
        if whole is not None:
            _prepend(whole, piece, _OF_REQUEST)
            for before, choice in zip(whole.outputs, piece.outputs, strict=True):
                _prepend(before, choice, _OF_CHOICE)
        return piece


def _prepend(before: Any, piece: Any, names: Sequence[str]) -> None:
    for name in names:
        known, more = getattr(before, name), getattr(piece, name)
        if known is not None and more is not None:
            known += more  # extends a list in place: a long answer comes in thousands of pieces
            setattr(piece, name, known)


def held_tokens(output: RequestOutput) -> int:
    """Tokens that a request's cache holds: prompt and answers minus evicted ones, at least 0."""
    generated = sum(len(choice.token_ids) for choice in output.outputs)
    evicted = sum(event.evicted_tokens for event in output.compactions)
    return max(len(output.prompt_token_ids) + generated - evicted, 0)


def total(parts: Collection[EngineStats]) -> EngineStats:
    """The sum of the statistics of several engines."""
    sums = {
        item.name: sum(getattr(part, item.name) for part in parts)
        for item in fields(EngineStats)
        if item.name not in ("compaction_counts", "continuation_misses", "iterations", "requests")
    }
    misses = Counter[str]()
    for part in parts:
        misses.update(dict(part.continuation_misses))
    iterations = (part.iterations for part in parts if part.iterations)
    return EngineStats(
        **sums,
        continuation_misses=tuple(misses.items()),
        compaction_counts=tuple(c for part in parts for c in part.compaction_counts),
        iterations=tuple(map(sum, zip(*iterations, strict=True))),
        requests=tuple(request for part in parts for request in part.requests),
    )
