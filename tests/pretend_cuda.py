"""CUDA without a GPU: what a device does with memory, graphs, copies and events, on a CPU.

Tensors of ``cuda`` lie in host memory and operators run at once. What torch leaves to whoever uses
CUDA is as it is there: a graph repeats its operators on the addresses that they had and keeps none
of the memory that others gave it; a copy to pinned memory is there once an event behind it has been
waited for; an event that the device has not reached has no time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kvserve.engine.attention.combined import ByPhase
from kvserve.engine.attention.paged import PagedAttention
from kvserve.engine.attention.select import Choice, Needs
from kvserve.engine.models import transformer
from kvserve.engine.models.operators import Operators
from kvserve.engine.runner import cuda_graph, plan
from kvserve.kernels.attend.paged_attention import paged_attention_torch
from kvserve.kernels.storage import TORCH

GIB = 1 << 30


@dataclass
class Queue:
    """What the device was given, and how far the host knows it to have come."""

    given: int = 0
    reached: int = 0
    copies: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    """Copies to pinned memory that nobody has waited for, and their places in the queue."""
    reads: dict[int, int] = field(default_factory=dict)
    """Pinned memory that copies to the device read, and the place of the last of them."""
    pinned_bytes: int = 0
    """All that was ever pinned, each rounded up as torch does it."""
    waits: int = 0
    streams: int = 0
    graphs: int = 0

    def give(self) -> int:
        self.given += 1
        return self.given

    def wait(self, place: int) -> None:
        self.waits += 1
        self.reached = max(self.reached, place)
        for at, copy in self.copies:
            if at <= self.reached:
                copy()
        self.copies = [(at, copy) for at, copy in self.copies if at > self.reached]


class PretendCuda(TorchFunctionMode):
    """Tensors of ``cuda`` are put into host memory; ``queue`` knows what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue()
        self._pinned: dict[int, StorageWeakRef] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return self._pin(args[0].clone())
        target = kwargs.get("out", args[0] if func is Tensor.copy_ else None)
        if self._is_pinned(target):
            unread = self.queue.reads.get(_address(target), 0)
            assert unread <= self.queue.reached, "memory is written that the device still reads"
            if kwargs.get("non_blocking"):
                return self._copy_later(target, args[1])
        to_cuda = func is Tensor.to and any(map(_is_cuda, (*args, *kwargs.values())))
        pin = kwargs.pop("pin_memory", False)
        result = func(*map(_here, args), **{name: _here(x) for name, x in kwargs.items()})
        if to_cuda:
            if self._is_pinned(args[0]):
                self.queue.reads[_address(args[0])] = self.queue.give()
            return result.clone()  # there it is another tensor
        return self._pin(result) if pin else result

    def _copy_later(self, target: Tensor, source: Tensor) -> Tensor:
        values = source.clone()
        target.fill_(-77)

        def copy() -> None:
            with torch.inference_mode(), torch._C.DisableTorchFunction():
                target.copy_(values)

        self.queue.copies.append((self.queue.give(), copy))
        return target

    def _pin(self, x: Tensor) -> Tensor:
        self._pinned[_address(x)] = StorageWeakRef(x.untyped_storage())
        self.queue.pinned_bytes += 1 << max(0, x.nbytes - 1).bit_length()
        self.queue.reads.pop(_address(x), None)  # of what had this address before
        return x

    def _is_pinned(self, x: Any) -> bool:
        if not isinstance(x, Tensor) or _address(x) not in self._pinned:
            return False
        return not self._pinned[_address(x)].expired()


class Place(NamedTuple):
    """Where a tensor lies, without keeping it there."""

    address: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Recorder(TorchDispatchMode):
    """Notes the operators that run, as a graph that is captured would."""

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[int, Any] = {}
        self._others: dict[int, StorageWeakRef] = {}
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        for x in inputs:
            if _address(x) not in self._own:
                self._others[_address(x)] = StorageWeakRef(x.untyped_storage())
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        there = {_address(x) for x in inputs}
        fresh = [x for x in outputs if _address(x) not in there]
        self._own |= {_address(x): x.untyped_storage() for x in fresh}
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        if fresh or writes:  # else a view of what is there
            noted = tree_map(_place_of, (args, kwargs, fresh))
            self._calls.append((func, *noted))
        return result

    def replay(self) -> None:
        """Run the operators again, into the memory that they wrote."""
        for func, args, kwargs, fresh in self._calls:
            args, kwargs, fresh = tree_map(
                self._tensor_at, (args, kwargs, fresh), is_leaf=_is_place
            )
            result = func(*args, **kwargs)
            outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            for to, x in zip(fresh, outputs, strict=False):
                to.copy_(x)

    def _tensor_at(self, place: Any) -> Any:
        if not isinstance(place, Place):
            return place
        storage = self._own.get(place.address)
        if storage is None:
            known = self._others[place.address]
            assert not known.expired(), "a graph reads memory that has been freed"
            storage = torch.UntypedStorage._new_with_weak_ptr(known.cdata)
        empty = torch.empty(0, dtype=place.dtype)
        return empty.set_(storage, place.offset, place.size, place.stride)


def _is_place(x: Any) -> bool:
    return isinstance(x, Place)


def _place_of(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    return Place(_address(x), x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset()))


def _address(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _is_cuda(x: Any) -> bool:
    if isinstance(x, torch.device):
        return x.type == "cuda"
    return isinstance(x, str) and x.startswith("cuda")


def _here(x: Any) -> Any:
    return torch.device("cpu") if _is_cuda(x) else x


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, queue: Queue, enable_timing: bool = False) -> None:
        self._queue, self._timed, self._at = queue, enable_timing, 0

    def record(self) -> None:
        self._at = self._queue.give()

    def synchronize(self) -> None:
        self._queue.wait(self._at)

    def elapsed_time(self, end: Event) -> float:
        for event in (self, end):
            assert event._timed and event._at, "no time was asked for"
            if event._at > self._queue.reached:
                raise RuntimeError("the device has not come to the event")
        return float(end._at - self._at)


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, queue: Queue) -> None:
        self._queue, self.recorder = queue, Recorder()

    def replay(self) -> None:
        self._queue.give()
        self.recorder.replay()


def pretend(patch: pytest.MonkeyPatch, queue: Queue) -> None:
    """Put stand-ins into ``torch.cuda``."""
    capturing: list[Graph] = []

    @contextmanager
    def captured(graph: Graph, **options: Any) -> Iterator[None]:
        assert not gc.isenabled(), "garbage may be freed in the middle of a capture"
        assert options.get("pool") is not None
        capturing.append(graph)
        queue.graphs += 1
        with graph.recorder:
            yield
        capturing.pop()

    def stream(*_: Any) -> Any:
        queue.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    stand_ins: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (GIB, 2 * GIB),
        "synchronize": lambda *_: queue.wait(queue.given),
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda *_: None,
        "max_memory_reserved": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "Event": lambda enable_timing=False: Event(queue, enable_timing),
        "Stream": stream,
        "stream": lambda _: nullcontext(),
        "current_stream": lambda *_: SimpleNamespace(wait_stream=lambda other: None),
        "CUDAGraph": lambda: Graph(queue),
        "graph": captured,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: bool(capturing),
    }
    for name, value in stand_ins.items():
        patch.setattr(torch.cuda, name, value)


@contextmanager
def pretend_cuda() -> Iterator[Queue]:
    """An engine that is built in here takes a GPU, and the torch references of its kernels."""

    def choose(wanted: str, needs: Needs) -> Choice:
        attention = PagedAttention(paged_attention_torch, needs.scale, needs.block_size)
        return Choice("triton", ByPhase(attention, attention), TORCH, "")

    mode = PretendCuda()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        pretend(patch, mode.queue)
        patch.setattr(plan, "select_backend", choose)
        patch.setattr(transformer, "select_operators", lambda *_: Operators("torch", ""))
        cuda_graph._capture_stream.cache_clear()
        stack.callback(cuda_graph._capture_stream.cache_clear)
        stack.enter_context(mode)
        yield mode.queue
