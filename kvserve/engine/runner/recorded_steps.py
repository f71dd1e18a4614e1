"""Decoding steps on a CPU as tapes: the first step of a size is recorded, later ones are played.

This is to a CPU what CUDA graphs are to a GPU. A tape has calls of compiled kernels alone, so a
model is recorded only if torch computes nothing in its layers. ``tapes.py`` sees each of torch's
operators while a step is recorded: views compute nothing, new tensors get memory that tapes share,
and any other operator means that this model's steps are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, ForwardBatch, LayerCache
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.cuda_graph import BOTH_KINDS, PaddedStep, StepRows
from kvserve.engine.runner.tapes import Recorder
from kvserve.kernels.cpu.calls import Tape

_LARGEST = 128
"""Steps of more rows are computed without a tape: Python is a small part of them."""
MOST_RECORDED_TOKENS, _MOST_SHAPES = 128, 256
"""Of chunks that are recorded. Of more tokens Python is a small part."""


class _Cache(LayerCache, Protocol):
    on_queries: Callable[[int, ForwardBatch, Tensor], None] | None
    """Called with the queries of each layer; nothing is played while anybody wants these."""


class RecordedSteps:
    """A tape for each number of rows and each kind of step. ``decode`` plays one."""

    def __init__(
        self,
        model: Transformer,
        cache: _Cache,
        batch: StepRows,
        attention: AttentionBackend,
        kinds: tuple[bool, ...] = BOTH_KINDS,
    ) -> None:
        """``kinds``: whether queries are logged."""
        self.replays = 0
        self.refused: str | None = None
        """The operator that keeps this model's steps from being recorded."""
        self._parts = model, cache, batch, attention
        self._recorder = Recorder()
        self._steps: dict[tuple[int, bool], _RecordedStep] = {}
        # All kinds are tried now, with no row, so that they store in the null block: what is said
        # at the start holds.
        nobody = torch.zeros((), dtype=torch.int64)
        for logs_queries in kinds:
            if self.refused is None:
                self._step(1, logs_queries, nobody)
        nobody.fill_(1)
        self.chunks = RecordedChunks(model, cache, attention, self._recorder)

    def hold(self, num_decoding: int) -> bool:
        """Whether a step of so many rows can be played."""
        return self.plays and 0 < num_decoding <= _LARGEST

    @property
    def plays(self) -> bool:
        """Whether anything can be played."""
        return self.refused is None and self._parts[1].on_queries is None

    def decode(self, num_decoding: int, logs_queries: bool = False) -> Tensor:
        """One token of each of the first rows: hidden states [num_decoding, hidden].

        They are overwritten by the next call.
        """
        self.replays += 1
        known = self._steps.get((num_decoding, logs_queries))
        if known is not None:
            return known.play()
        return self._step(num_decoding, logs_queries, torch.tensor(num_decoding))

    def _step(self, size: int, logs_queries: bool, count: Tensor) -> Tensor:
        """Compute a step that no tape has yet, and record it."""
        model, cache, batch, attention = self._parts
        buffers = batch.decoding(size, logs_queries)
        step = PaddedStep(model, cache, batch, count, buffers, attention.plan(buffers))
        filling = self._recorder.record(step.update)
        computing = self._recorder.record(partial(step.compute, filling.answer))
        by_torch = filling.refused is not None  # of further cache groups
        if computing.refused is None:
            tape = Tape(computing.calls if by_torch else filling.calls + computing.calls)
            self._steps[size, logs_queries] = _RecordedStep(step, tape, computing.answer, by_torch)
        self.refused = computing.refused
        return computing.answer


@dataclass(frozen=True, eq=False)
class _RecordedStep:
    """``hidden`` is where the tape leaves its answer; ``step`` has what it reads."""

    step: PaddedStep
    tape: Tape
    hidden: Tensor
    updates: bool
    """Whether the step's inputs are not on the tape."""

    def play(self) -> Tensor:
        if self.updates:
            self.step.update()
        self.tape.play()
        return self.hidden


class RecordedChunks:
    """Forwards over few tokens, as of guesses: a tape for each number of chunks and of tokens.
    Whose chunks they are, and how long each is, are inputs of a tape."""

    def __init__(
        self,
        model: Transformer,
        cache: LayerCache,
        attention: AttentionBackend,
        recorder: Recorder | None = None,
    ) -> None:
        self.replays = 0
        self._parts = model, cache, attention
        self._recorder = recorder or Recorder()
        self._known: dict[Any, _RecordedChunks] = {}
        self._seen: set[Any] = set()
        self._refused = False

    def forward(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        """Hidden states of all tokens [T, hidden]; they may be overwritten by the next call."""
        shape = len(batch.rows), input_ids.shape[0], batch.query_slots is None
        known = self._known.get(shape)
        if known is not None:
            self.replays += 1
            return known.play(input_ids, batch)
        model, cache, attention = self._parts
        # A shape is recorded when it comes again, since recording takes longer than computing.
        again, few = shape in self._seen, input_ids.shape[0] <= MOST_RECORDED_TOKENS
        if few:
            self._seen.add(shape)
        if self._refused or not again or len(self._known) >= _MOST_SHAPES:
            return model(input_ids, batch, cache, attention.plan(batch))
        ids, buffers = input_ids.clone(), _copied(batch)
        planned = attention.plan(buffers)
        recording = self._recorder.record(lambda: model(ids, buffers, cache, planned))
        self._refused = recording.refused is not None
        if not self._refused:
            given = ids, buffers, planned
            self._known[shape] = _RecordedChunks(given, Tape(recording.calls), recording.answer)
        return recording.answer


@dataclass(frozen=True, eq=False)
class _RecordedChunks:
    given: tuple[Tensor, ForwardBatch, Any]
    """Token ids, the batch and its plan: what the tape reads."""
    tape: Tape
    hidden: Tensor

    def play(self, input_ids: Tensor, batch: ForwardBatch) -> Tensor:
        ids, buffers, _ = self.given
        ids.copy_(input_ids)
        _fill(buffers, batch)
        self.tape.play()
        return self.hidden


_BY_STEP = ("positions", "prompt_lens", "slots", "query_slots", "last", "recent", "first")
"""Fields of a batch that are made anew in each step; the others are at addresses that stay."""


def _copied(batch: ForwardBatch) -> ForwardBatch:
    """The same, with memory of its own for what a step makes. Plans of a CPU read rows and starts
    where they are, as int64."""
    made = {name: getattr(batch, name) for name in _BY_STEP}
    own: dict[str, Any] = {name: None if x is None else x.clone() for name, x in made.items()}
    own["further"] = tuple(x.clone() for x in batch.further)
    own |= {"rows": batch.rows.astype(np.int64), "starts": batch.starts.astype(np.int64)}
    own["windowed"] = None if batch.windowed is None else _copied(batch.windowed)
    return replace(batch, **own)


def _fill(buffers: ForwardBatch, batch: ForwardBatch) -> None:
    """Copy what a step has made into what ``_copied`` made for its tape."""
    buffers.rows[:], buffers.starts[:] = batch.rows, batch.starts
    for own, new in zip(_inputs(buffers), _inputs(batch), strict=True):
        own.copy_(new)
    if buffers.windowed is not None and batch.windowed is not None:
        _fill(buffers.windowed, batch.windowed)


def _inputs(batch: ForwardBatch) -> list[Tensor]:
    """The tensors that a step makes, in one order; those of layers with windows aside."""
    found = [x for x in (getattr(batch, name) for name in _BY_STEP) if x is not None]
    return [*found, *batch.further]
