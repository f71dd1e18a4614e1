"""Recording what a model computes on a CPU as compiled calls, with memory of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.kernels.cpu.calls import Call, recorded

_ALIGNED = 64
_CHUNK = 2**20
_ALLOCATES = ("empty", "empty_like", "new_empty")


@dataclass(frozen=True, eq=False)
class Recording:
    """``answer`` is where a tape of the ``calls`` leaves what it computes. ``refused`` is the first
    of torch's operators that computed something: a tape would lack it."""

    calls: list[Call]
    answer: Tensor
    refused: str | None


class Recorder:
    """Tapes of one recorder write to the same memory, so they are never played at once."""

    def __init__(self) -> None:
        self._memory = _Memory()

    @torch.inference_mode()
    def record(self, compute: Callable[[], Tensor], *, made: bool = True) -> Recording:
        """Compute, and note the calls of compiled kernels; unless they are ``made``, the answer is
        what a tape leaves there."""
        with recorded(made=made) as calls, _Watch(self._memory) as watch:
            answer = compute()
        return Recording(calls, answer, watch.refused)


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
