"""Decoding steps on a CPU as tapes: the first step of a size is recorded, later ones are played.

This is to a CPU what CUDA graphs are to a GPU. A tape has calls of compiled kernels alone, so a
model is recorded only if torch computes nothing in its layers. ``_Watch`` sees each of torch's
operators while a step is recorded: views compute nothing, new tensors get memory that tapes share,
and any other operator means that this model's steps are not recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.engine.attention.base import AttentionBackend
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.cuda_graph import PaddedStep
from kvserve.kernels.cpu.calls import Tape, recorded

_LARGEST = 256
"""Steps of more rows are computed without a tape: Python is a small part of them."""
_ALIGNED = 64
_CHUNK = 2**20
_ALLOCATES = ("empty", "empty_like", "new_empty")


class RecordedSteps:
    """A tape for each number of rows, with queries logged and without. ``decode`` plays one."""

    def __init__(
        self, model: Transformer, cache: KVCache, batch: InputBatch, attention: AttentionBackend
    ) -> None:
        self.replays = 0
        self.refused: str | None = None
        """The operator that keeps this model's steps from being recorded."""
        self._parts = model, cache, batch, attention
        self._memory = _Memory()
        self._steps: dict[tuple[int, bool], _RecordedStep] = {}
        nobody = torch.zeros((), dtype=torch.int64)
        self._step(1, logs_queries=False, count=nobody)  # it stores in the null block
        nobody.fill_(1)

    def hold(self, num_decoding: int) -> bool:
        """Whether a step of so many rows can be played; whoever measures queries needs them all."""
        measured = self._parts[1].on_queries is not None
        return self.refused is None and 0 < num_decoding <= _LARGEST and not measured

    def decode(self, num_decoding: int, logs_queries: bool) -> Tensor:
        """One token of each of the first rows: hidden states [num_decoding, hidden].

        They are overwritten by the next call.
        """
        self.replays += 1
        known = self._steps.get((num_decoding, logs_queries))
        if known is not None:
            return known.play()
        return self._step(num_decoding, logs_queries, torch.tensor(num_decoding))

    @torch.inference_mode()
    def _step(self, size: int, logs_queries: bool, count: Tensor) -> Tensor:
        """Compute a step that no tape has yet, and record it."""
        model, cache, batch, attention = self._parts
        buffers = batch.decoding(size, logs_queries)
        step = PaddedStep(model, cache, batch, count, buffers, attention.plan(buffers))
        with recorded() as filling, _Watch(self._memory) as filled:
            input_ids = step.update()
        with recorded() as tape, _Watch(self._memory) as computed:
            hidden = step.compute(input_ids)
        by_torch = filled.refused is not None  # of further cache groups
        if computed.refused is None:
            tape = tape if by_torch else filling.followed_by(tape)
            self._steps[size, logs_queries] = _RecordedStep(step, tape, hidden, by_torch)
        self.refused = computed.refused
        return hidden


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


class _Watch(TorchDispatchMode):
    """``refused`` is the first operator that computed something."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.refused: str | None = None
        self._memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _ALLOCATES and answer.is_contiguous():
            return self._memory.tensor(answer.shape, answer.dtype)
        if func._schema.is_mutable or not _views(answer, args):
            self.refused = self.refused or str(func)
        return answer


def _views(answer: Any, args: tuple[Any, ...]) -> bool:
    """Whether all tensors of ``answer`` lie in memory of ``args``."""
    given = {_address(x) for x in args if isinstance(x, Tensor)}
    answers = [answer] if isinstance(answer, Tensor) else answer
    if not isinstance(answers, list | tuple):
        return False  # a number, which may differ in the next step
    return all(isinstance(x, Tensor) and _address(x) in given for x in answers)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Memory:
    """What steps write to. A tensor's memory goes to the next one when it dies, as in any
    allocator; but never to anybody else, since tapes go on writing there."""

    def __init__(self) -> None:
        self._chunks: list[np.ndarray[Any, Any]] = []
        self._free: list[tuple[int, int, int]] = []
        """Chunk, first byte, end."""

    def tensor(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """A dense one; it is not initialised."""
        wanted = prod(shape) * dtype.itemsize
        size = max(1, -(-wanted // _ALIGNED)) * _ALIGNED
        place = next((i for i, (_, at, end) in enumerate(self._free) if end - at >= size), None)
        if place is None:
            place = len(self._free)
            self._add_chunk(size)
        chunk, start, end = self._free.pop(place)
        if start + size < end:
            self._free.insert(place, (chunk, start + size, end))
        part = self._chunks[chunk][start : start + size]
        finalize(part, self._give_back, chunk, start, start + size).atexit = False
        return torch.from_numpy(part)[:wanted].view(dtype).view(shape)

    def _add_chunk(self, size: int) -> None:
        size = max(size, _CHUNK)
        memory = np.empty(size + _ALIGNED, np.uint8)
        first = -memory.ctypes.data % _ALIGNED
        self._free.append((len(self._chunks), first, first + size))
        self._chunks.append(memory)

    def _give_back(self, chunk: int, start: int, end: int) -> None:
        merged: list[tuple[int, int, int]] = []
        for each in sorted([*self._free, (chunk, start, end)]):
            if merged and merged[-1][0] == each[0] and merged[-1][2] == each[1]:
                merged[-1] = (each[0], merged[-1][1], each[2])
            else:
                merged.append(each)
        self._free = merged
