"""Decoding steps on a CPU as tapes: the first step of a size is recorded, later ones are played.

This is to a CPU what CUDA graphs are to a GPU. A tape has calls of compiled kernels alone, so a
model is recorded only if torch computes nothing in its layers. ``tapes.py`` sees each of torch's
operators while a step is recorded: views compute nothing, new tensors get memory that tapes share,
and any other operator means that this model's steps are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.step_buffers import hide_tokens
from kvserve.engine.runner.padded_step import BOTH_KINDS, PaddedStep, StepParts
from kvserve.engine.runner.tapes import Recorder
from kvserve.kernels.cpu.calls import Tape
from kvserve.scheduler.arrays import IntArray

_LARGEST = 128
"""Steps of more rows, or of more tokens in chunks, are computed without a tape: Python is a small
part of them."""
_MOST_SHAPES = 256
"""Of chunks that are recorded."""
_ROWS, _TOKENS = 4, 8
"""Chunks of more rows, or of more tokens in all, are padded to a multiple of this. A shape's first
step takes three times as long as later ones, so there must be few."""


class RecordedSteps:
    """A tape for each number of rows and each kind of step, and for numbers of rows and of tokens
    in their chunks. ``decode`` and ``chunks`` play one."""

    def __init__(
        self,
        parts: StepParts,
        kinds: tuple[bool, ...] = BOTH_KINDS,
        measured: Callable[[], bool] = bool,
    ) -> None:
        """``kinds``: whether queries are logged. Nothing is played while ``measured()``: somebody
        wants what each layer computes."""
        self.replays = self.chunk_replays = 0
        self.refused: str | None = None
        """The operator that keeps this model's steps from being recorded."""
        self.num_new = 0
        """Steps so far that no tape was there for, but is or will be: later ones are faster."""
        self._parts, self._measured = parts, measured
        self._recorder = Recorder()
        self._steps: dict[tuple[int, bool], _Played] = {}
        self._chunks: dict[tuple[int, int, bool], _Played] = {}
        self._most_rows = parts.rows.decoding(1, kinds[0]).tables.shape[1]
        # All kinds are tried now, with no row, so that they store in the null block: what is said
        # at the start holds.
        nobody = torch.zeros((), dtype=torch.int64)
        for logs_queries in kinds:
            if self.refused is None:
                self._step(1, logs_queries, nobody)
        nobody.fill_(1)

    def hold(self, num_decoding: int) -> bool:
        """Whether a step of so many rows can be played."""
        return self._plays and 0 < num_decoding <= _LARGEST

    def hold_chunks(self, lengths: IntArray) -> bool:
        """Whether a step with chunks of these ``lengths [n]`` can."""
        return self._plays and int(lengths.sum()) <= _LARGEST

    @property
    def _plays(self) -> bool:
        return self.refused is None and not self._measured()

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
        self.num_new += 1
        step = self._parts.step(size, logs_queries, count)
        hidden, played = self._record(step)
        if played is not None:
            self._steps[size, logs_queries] = played
        return hidden

    def chunks(self, lengths: IntArray, token_ids: Tensor, logs_queries: bool = False) -> Tensor:
        """Chunks of ``lengths [n]`` of the first rows: hidden states [T, hidden] of ``token_ids
        [T]``. How long each chunk is, is an input of a tape."""
        tokens = len(token_ids)
        rows = min(_padded(len(lengths), _ROWS), self._most_rows)
        padded = _padded(tokens, _TOKENS)
        shape = rows, padded, logs_queries
        known = self._chunks.get(shape)
        if known is not None:
            self.chunk_replays += 1
            _fill(known.step, lengths, token_ids)
            return known.play()[:tokens]
        starts = np.zeros(rows + 1, np.int64)
        starts[-1] = padded
        step = self._parts.chunks(starts, logs_queries, torch.tensor(0))
        _fill(step, lengths, token_ids)
        if len(self._chunks) >= _MOST_SHAPES:
            return step.forward()[:tokens]
        self.num_new += 1
        hidden, played = self._record(step)
        if played is not None:
            self._chunks[shape] = played
        return hidden[:tokens]

    def _record(self, step: PaddedStep) -> tuple[Tensor, _Played | None]:
        """Compute ``step``, and record it unless torch computes something in its layers."""
        filling = self._recorder.record(step.update)
        computing = self._recorder.record(partial(step.compute, filling.answer))
        self.refused = computing.refused
        if self.refused is not None:
            return computing.answer, None
        by_torch = filling.refused is not None  # of further cache groups
        calls = computing.calls if by_torch else filling.calls + computing.calls
        return computing.answer, _Played(step, Tape(calls), computing.answer, by_torch)


def _padded(number: int, step: int) -> int:
    """The next multiple of ``step``, unless ``number`` is below it."""
    return number if number < step else -(-number // step) * step


def _fill(step: PaddedStep, lengths: IntArray, token_ids: Tensor) -> None:
    """Give ``step`` chunks of these ``lengths [n]``; further rows and tokens are padding. Padded
    tokens are in no chunk: a row's bits do not depend on them."""
    chunks, ids = step.chunks, step.token_ids
    assert chunks is not None and ids is not None
    n, tokens = len(lengths), len(token_ids)
    starts = step.buffers.starts  # the memory of ``chunks.starts``
    np.cumsum(lengths, out=starts[1 : n + 1])
    starts[n + 1 :] = tokens
    real, rows = chunks.lengths.numpy(), chunks.rows.numpy()
    real[:n], real[n:] = lengths, 0
    rows[:tokens], rows[tokens:] = np.repeat(np.arange(n), lengths), len(real) - 1
    ids[:tokens] = token_ids
    step.count.fill_(n)
    hide_tokens(step.buffers, tokens)


@dataclass(frozen=True, eq=False)
class _Played:
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
