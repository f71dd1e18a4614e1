"""Calls of compiled kernels, and tapes of them: calls that are made again without Python between.

A kernel's arguments are the fields of one struct, which its C++ file alone declares. A tape is for
kernels what a CUDA graph is for launches: it holds addresses and numbers. Whoever plays it keeps
the tensors alive whose addresses it has, and changes only what they hold.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from struct import Struct
from typing import Any

import torch
from torch import Tensor

from kvserve.kernels.build import load_library, source_of, why_missing

LARGEST_DIM = 256

Refusal = Callable[[int], Exception]
"""From what a kernel returned, if it is not 0, to the error that says so."""

_ALIGNED = 16
_PLAIN = frozenset((int, bool, float, type(None)))

_CODES = {"int32_t": "i", "int64_t": "q", "float": "f", "double": "d"}
"""As ``struct.pack`` calls the types of numbers."""


class _Item(ctypes.Structure):
    """``Item`` of ``calls.cpp``, field by field."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("refuses", ctypes.c_int64),
    )


Call = tuple[Any, bytes, Refusal | None]
"""A kernel, what it reads, and what is raised if it refuses."""


class _Recording(threading.local):
    calls: list[Call] | None = None
    made: bool = True


_recording = _Recording()


class Tape:
    """Calls that are made again as often as wanted, in this order, side by side in memory."""

    def __init__(self, calls: list[Call]) -> None:
        sizes = [-(-len(call) // _ALIGNED) * _ALIGNED for _, call, _ in calls]
        self._calls = ctypes.create_string_buffer(sum(sizes) + _ALIGNED)
        self._items = (_Item * len(calls))()
        self._refusals: dict[int, Refusal] = {}
        at = -(-ctypes.addressof(self._calls) // _ALIGNED) * _ALIGNED
        for i, ((function, call, refusal), size) in enumerate(zip(calls, sizes, strict=True)):
            ctypes.memmove(at, call, len(call))
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


def run(library: ctypes.CDLL, name: str, call: bytes, refusal: Refusal | None = None) -> None:
    """Call ``kvserve_<name>`` of a library; without ``refusal`` it returns nothing."""
    function = getattr(library, f"kvserve_{name}")
    code = function(call) if _recording.made else 0
    if refusal is not None and code:
        raise refusal(code)
    if _recording.calls is not None:
        _recording.calls.append((function, call, refusal))


class Compiled:
    """``kvserve_<name>`` of a C++ file, called with the fields of its struct."""

    def __init__(self, name: str, file: str | None = None) -> None:
        self.name, self.file = name, file or name

    @cached_property
    def _source(self) -> str:
        """Without comments."""
        return re.sub("//.*", "", source_of(self.file).read_text())

    @cached_property
    def _form(self) -> tuple[Struct, int, int]:
        """The struct, how many numbers it has, and which field the fault is."""
        struct = re.search(rf"kvserve_{self.name}\(const (\w+)\*", self._source)
        assert struct is not None, f"{self.file}.cpp has no {self.name} that reads a struct"
        fields = _fields(self._source, struct[1])
        form = Struct("".join(fields.values()))
        return form, len(form.unpack(bytes(form.size))), [*fields, "fault"].index("fault")

    def records(self, name: str, fields: Sequence[tuple[Any, ...]]) -> ctypes.Array[Any]:
        """Structs ``name`` side by side, for a field that points to them: keep them meanwhile."""
        form = Struct("".join(_fields(self._source, name).values()) + "0q")
        return ctypes.create_string_buffer(b"".join(form.pack(*_numbers(x)) for x in fields))

    def takes(self, x: Tensor, *dtypes: torch.dtype, multiple: int = 1) -> bool:
        """Whether there is a library, and ``x`` is on the CPU and of one of ``dtypes``.

        For a ``multiple``, also: its last dimension is dense, such a multiple, and not too large.
        """
        if x.device.type != "cpu" or x.dtype not in dtypes:
            return False
        dim = x.shape[-1]
        if multiple > 1 and (dim % multiple or dim > LARGEST_DIM or x.stride(-1) != 1):
            return False
        return why_missing(self.file) is None

    def __call__(
        self, *fields: Any, refused: str | Mapping[int, str] = "", defines: tuple[str, ...] = ()
    ) -> None:
        """Run with the struct's ``fields`` in their order: tensors (or ``None``), numbers, tuples.

        ``fault`` is left out. What the kernel writes there fills in ``refused``, the words (of each
        number that it may return) for the ``IndexError`` that then is raised.
        """
        (form, count, at), refusal = self._form, None
        if refused:
            fault = (ctypes.c_int64 * 2)()

            def refusal(code: int) -> Exception:
                words = refused if isinstance(refused, str) else refused[code]
                return IndexError(f"{self.name}: {words.format(*fault)}")

            fields = *fields[:at], ctypes.addressof(fault), *fields[at:]
        numbers = _numbers(fields)
        if len(numbers) != count:
            raise TypeError(f"{self.name}: {len(numbers)} of {count} numbers")
        run(load_library(self.file, *defines), self.name, form.pack(*numbers), refusal)


def slot_outside(num_blocks: int, block_size: int) -> str:
    """What is said of a slot that no block has."""
    return f"slot {{}} is not in a pool of {num_blocks} blocks of {block_size}"


def as_int64(x: Tensor) -> Tensor:
    """Dense int64."""
    return x.to(torch.int64).contiguous()


def _numbers(fields: Iterable[Any]) -> list[Any]:
    """Tensors and records as their addresses, ``None`` as 0; tuples are joined."""
    found: list[Any] = []
    for x in fields:
        if type(x) in _PLAIN:  # most are
            found.append(x or 0)
        elif isinstance(x, tuple):
            found += _numbers(x)
        elif isinstance(x, Tensor):
            found.append(x.data_ptr())
        else:
            found.append(ctypes.addressof(x) if isinstance(x, ctypes.Array) else x)
    return found


def _fields(source: str, name: str) -> dict[str, str]:
    """Those of a struct of C++ ``source``, whose comments are gone, as ``struct.pack`` calls them:
    pointers, numbers, arrays, structs."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", source, re.DOTALL)
    assert body is not None, name
    fields = {}
    for words in filter(str.strip, body[1].split(";")):
        kind, names = words.replace("const ", "").replace("* ", " *").split(maxsplit=1)
        for pointer, field, length in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
            code = "P" if pointer else _CODES.get(kind)
            nested = "" if code else "".join(_fields(source, kind).values())
            fields[field] = f"{length}{code}" if code else f"{nested}0q"  # to whole words
    return fields
