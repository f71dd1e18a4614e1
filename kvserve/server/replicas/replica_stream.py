"""Sends a request's output from a replica to the server, in pieces that hold only what is new.

Also adds up the statistics of several engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import fields, replace

from kvserve.outputs import CompletionOutput, RequestOutput
from kvserve.stats import EngineStats


class OutputWriter:
    """The replica's end: cuts the growing output of one request into pieces."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._tokens: dict[int, int] = {}
        self._chars: dict[int, int] = {}
        self._traced: dict[int, int] = {}
        self._prompt_logprobs = 0
        self._compactions = 0

    def cut(self, output: RequestOutput) -> RequestOutput:
        """What came since the last piece, without the prompt."""
        scored = output.prompt_logprobs
        piece = replace(
            output,
            prompt=None,
            prompt_token_ids=[],
            outputs=[self._tail(choice) for choice in output.outputs],
            prompt_logprobs=None if scored is None else scored[self._prompt_logprobs :],
            compactions=output.compactions[self._compactions :],
            engine=self._engine,
        )
        self._prompt_logprobs = len(scored or ())
        self._compactions = len(output.compactions)
        return piece

    def _tail(self, choice: CompletionOutput) -> CompletionOutput:
        i = choice.index
        tokens, chars = self._tokens.get(i, 0), self._chars.get(i, 0)
        self._tokens[i], self._chars[i] = len(choice.token_ids), len(choice.text)
        traced, self._traced[i] = self._traced.get(i, 0), len(choice.kv_trace or ())
        return replace(
            choice,
            text=choice.text[chars:],
            token_ids=choice.token_ids[tokens:],
            logprobs=None if choice.logprobs is None else choice.logprobs[tokens:],
            text_offsets=None if choice.text_offsets is None else choice.text_offsets[tokens:],
            kv_trace=None if choice.kv_trace is None else choice.kv_trace[traced:],
        )


class OutputReader:
    """The server's end: joins the pieces into one growing output."""

    def __init__(self, prompt_token_ids: list[int]) -> None:
        self._prompt = prompt_token_ids
        self._output: RequestOutput | None = None

    def join(self, piece: RequestOutput) -> RequestOutput:
        whole, self._output = self._output, piece
        piece.prompt_token_ids = self._prompt
        if whole is not None:
            piece.compactions = whole.compactions + piece.compactions
            if whole.prompt_logprobs is not None and piece.prompt_logprobs is not None:
                piece.prompt_logprobs = [*whole.prompt_logprobs, *piece.prompt_logprobs]
            for before, choice in zip(whole.outputs, piece.outputs, strict=True):
                _prepend(before, choice)
        return piece


def _prepend(before: CompletionOutput, choice: CompletionOutput) -> None:
    """Extend lists in place: a long answer comes in thousands of pieces."""
    before.token_ids += choice.token_ids
    choice.token_ids = before.token_ids
    choice.text = before.text + choice.text
    for name in ("logprobs", "text_offsets", "kv_trace"):
        known, more = getattr(before, name), getattr(choice, name)
        if known is not None and more is not None:
            known += more
            setattr(choice, name, known)


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
