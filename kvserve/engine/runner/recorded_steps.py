"""Decoding steps on a CPU as tapes: a step of each size is recorded once, then played.

This is to a CPU what CUDA graphs are to a GPU. A tape has calls of compiled kernels alone, so a
model is recorded only if torch computes nothing in its layers. ``_Watch`` sees each of torch's
operators while a step is recorded: views compute nothing, new tensors get memory that tapes share,
and any other operator means that this model's steps are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.engine.device.transfer import to_device
from kvserve.engine.messages import Row
from kvserve.engine.runner.padded_step import BOTH_KINDS, PaddedStep, StepParts
from kvserve.kernels.calls import Call, Tape, recorded
from kvserve.scheduler.arrays import IntArray

_LARGEST = 128
"""Steps of more rows, or of more tokens in chunks, are computed without a tape: Python is a small
part of them."""
_MOST_TAPES = 512
_ROWS, _TOKENS = 4, 8
"""Chunks of more tokens in all are padded to a multiple of ``_TOKENS``, and to ``_ROWS`` rows or
twice, four times, ... as many, so that there are few shapes. A row without tokens costs nothing."""
_SINGLE = 0
"""Tokens in chunks, of a step that has none."""

Shape = tuple[int, int, bool]
"""Rows, tokens in their chunks, and whether queries are logged."""


class RecordedSteps:
    """A tape for each number of rows and each kind of step, and for numbers of rows and of tokens
    in their chunks. ``decode`` and ``chunks`` play one."""

    def __init__(
        self, parts: StepParts, longest: int = 1, kinds: Iterable[bool] = BOTH_KINDS
    ) -> None:
        """Rows may have chunks of up to ``longest`` tokens. ``kinds``: those that every engine of
        these settings meets; others are recorded when a request brings them."""
        self.replays = self.chunk_replays = 0
        self.refused: str | None = None
        """The operator that keeps this model's steps from being recorded."""
        self._parts = parts
        self._memory = _Memory()
        """Tapes write to the same memory, so they are never played at once."""
        self._tapes: dict[Shape, _Recorded] = {}
        self._most_rows = parts.rows.block_tables.shape[1]
        # These are tried now, with no row, so that they store in the null block: what is said
        # at the start holds. Only here do the kernels run: torch may compute with what they write.
        tried = [(1, _SINGLE)] + [self._padded(1, longest)] * (longest > 1)
        for shape in ((*each, logs) for logs in kinds for each in tried):
            if self.refused is None:
                self._record(shape, made=True)

    def row(self, reason: str) -> Row:
        """The start-up table's row; a reason to capture none says nothing of these."""
        if self.refused is not None:
            return "recorded steps", "off", f"torch computes {self.refused} in a layer"
        how = "compiled kernels are called without Python between; --enforce-eager"
        return "recorded steps", "decodes, each size once", how

    def _plays(self, tokens: int) -> bool:
        """Whether so many are played; none while somebody wants what each layer computes."""
        free = self.refused is None and self._parts.cache.on_queries is None
        return free and 0 < tokens <= _LARGEST

    def decode(self, num_decoding: int, logs_queries: bool = False) -> Tensor | None:
        """One token of each of the first rows: hidden states [num_decoding, hidden], which the next
        call overwrites; ``None`` if such a step is not played."""
        if not self._plays(num_decoding):
            return None
        self.replays += 1
        recorded, step = self._of((num_decoding, _SINGLE, logs_queries))
        step.count.fill_(num_decoding)
        return (recorded or step).forward()

    def chunks(
        self, lengths: IntArray, token_ids: IntArray, logs_queries: bool = False
    ) -> Tensor | None:
        """Chunks of ``lengths [n]`` of the first rows: hidden states [T, hidden] of ``token_ids
        [T]``, or ``None``. How long each chunk is, is an input of a tape."""
        if not self._plays(len(token_ids)):
            return None
        self.chunk_replays += 1
        shape = *self._padded(len(lengths), len(token_ids)), logs_queries
        recorded, step = self._of(shape)
        _fill(step, lengths, to_device(token_ids, "cpu"))
        return (recorded or step).forward()[: len(token_ids)]

    def _padded(self, rows: int, tokens: int) -> tuple[int, int]:
        """The shape that chunks of ``tokens`` of so many rows are padded to."""
        if rows > 1:
            rows = min(max(1 << (rows - 1).bit_length(), _ROWS), self._most_rows)
        return rows, tokens if tokens < _TOKENS else -(-tokens // _TOKENS) * _TOKENS

    def _of(self, shape: Shape) -> tuple[_Recorded | None, PaddedStep]:
        """The step of ``shape``, which is recorded if it is new, unless there are too many."""
        known = self._tapes.get(shape)
        if known is None and len(self._tapes) < _MOST_TAPES:
            known = self._record(shape)
        return known, self._step(shape) if known is None else known.step

    def _step(self, shape: Shape) -> PaddedStep:
        """For no rows yet."""
        rows, tokens, logs_queries = shape
        nobody = torch.zeros((), dtype=torch.int64)
        if tokens == _SINGLE:
            return self._parts.step(rows, logs_queries, nobody)
        starts = np.zeros(rows + 1, np.int64)
        starts[-1] = tokens
        step = self._parts.chunks(starts, logs_queries, nobody)
        _fill(step, starts[:0], torch.empty(0, dtype=torch.int64))
        return step

    def _record(self, shape: Shape, *, made: bool = False) -> _Recorded | None:
        """Record the calls of such a step, unless torch computes something in its layers."""
        step = self._step(shape)
        filling, ids, by_torch = self._calls_of(step.update, made)
        computing, hidden, refused = self._calls_of(partial(step.compute, ids), made)
        self.refused = self.refused or refused
        if refused is not None:
            return None
        updates = by_torch is not None  # of further cache groups
        calls = computing if updates else filling + computing
        self._tapes[shape] = _Recorded(step, Tape(calls), hidden, updates)
        return self._tapes[shape]

    @torch.inference_mode()
    def _calls_of(
        self, compute: Callable[[], Tensor], made: bool
    ) -> tuple[list[Call], Tensor, str | None]:
        """The calls of compiled kernels in ``compute``, and where a tape of them leaves its answer,
        which is there now if they are ``made``. Last, the first of torch's operators that computed
        something: a tape would lack it."""
        with recorded(made=made) as calls, _Watch(self._memory) as watch:
            answer = compute()
        return calls, answer, watch.refused


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
    # What is behind sees nothing, and is stored in the null block.
    for numbers in (step.buffers.positions, step.buffers.slots, step.buffers.query_slots):
        if numbers is not None:
            numbers[..., tokens:] = 0
    step.buffers.last[..., tokens:] = -1


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A step, and the tape of it."""

    step: PaddedStep
    tape: Tape
    hidden: Tensor
    """Where the tape leaves its answer."""
    updates: bool
    """Whether the step's inputs are not on the tape."""

    def forward(self) -> Tensor:
        """As ``PaddedStep.forward``."""
        if self.updates:
            self.step.update()
        self.tape.play()
        return self.hidden


_ALIGNED = 64
_CHUNK = 2**20
_ALLOCATES = ("empty", "empty_like", "new_empty")


class _Watch(TorchDispatchMode):
    """``refused`` is the first operator that computed something."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.refused: str | None = None
        self._memory = memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler, as long as torch itself, to keep it away from here."""
        return False

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
    # Reordered weights have no address that may be asked for.
    given = {_address(x) for x in args if isinstance(x, Tensor) and x.layout is torch.strided}
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
