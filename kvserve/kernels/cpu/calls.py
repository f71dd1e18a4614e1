"""Calls of compiled kernels, and tapes of them: calls that are made again without Python between.

A tape is for kernels what a CUDA graph is for launches: it holds addresses and numbers. Whoever
plays it keeps the tensors alive whose addresses it has, and changes only what they hold.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvserve.kernels.cpu.build import load_library

Refusal = Callable[[int], Exception]
"""From what a kernel returned, if it is not 0, to the error that says so."""

_ALIGNED = 16


class _Item(ctypes.Structure):
    """``Item`` of ``calls.cpp``, field by field."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("refuses", ctypes.c_int64),
    )


Call = tuple[Any, ctypes.Structure, Refusal | None]
"""A kernel, what it reads, and what is raised if it refuses."""


class _Recording(threading.local):
    calls: list[Call] | None = None
    made: bool = True


_recording = _Recording()


class Tape:
    """Calls that are made again as often as wanted, in this order, side by side in memory."""

    def __init__(self, calls: list[Call]) -> None:
        sizes = [-(-ctypes.sizeof(call) // _ALIGNED) * _ALIGNED for _, call, _ in calls]
        self._calls = ctypes.create_string_buffer(sum(sizes) + _ALIGNED)
        self._items = (_Item * len(calls))()
        self._refusals: dict[int, Refusal] = {}
        at = -(-ctypes.addressof(self._calls) // _ALIGNED) * _ALIGNED
        for i, ((function, call, refusal), size) in enumerate(zip(calls, sizes, strict=True)):
            ctypes.memmove(at, ctypes.addressof(call), ctypes.sizeof(call))
            address = ctypes.cast(function, ctypes.c_void_p)
            self._items[i] = _Item(address, at, refusal is not None)
            if refusal is not None:
                self._refusals[i] = refusal
            at += size
        self._play = load_library("calls").kvserve_play
        self._at = ctypes.c_int64()

    def play(self) -> None:
        """Make all calls, up to the first that is refused: its error is raised."""
        code = self._play(self._items, len(self._items), ctypes.byref(self._at))
        if code:
            raise self._refusals[self._at.value](code)


@contextmanager
def recorded(*, made: bool = True) -> Iterator[list[Call]]:
    """The calls of this thread are noted, and made as always, or not ``made``."""
    assert _recording.calls is None, "calls are recorded already"
    calls: list[Call] = []
    _recording.calls, _recording.made = calls, made
    try:
        yield calls
    finally:
        _recording.calls, _recording.made = None, True


def run(
    library: ctypes.CDLL, name: str, call: ctypes.Structure, refusal: Refusal | None = None
) -> None:
    """Call ``kvserve_<name>`` of a library; without ``refusal`` it returns nothing."""
    function = getattr(library, f"kvserve_{name}")
    code = function(ctypes.byref(call)) if _recording.made else 0
    if refusal is not None and code:
        raise refusal(code)
    if _recording.calls is not None:
        _recording.calls.append((function, call, refusal))


def slot_refusal(name: str, fault: ctypes.c_int64, num_blocks: int, block_size: int) -> Refusal:
    """That of a kernel that was given the slot ``fault``, which no block has."""

    def refusal(_: int) -> IndexError:
        return IndexError(
            f"{name}: slot {fault.value} is not in a pool of {num_blocks} blocks of {block_size}"
        )

    return refusal
