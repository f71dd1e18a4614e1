"""Calls of compiled kernels, and tapes of them: calls that are made again without Python between.

A kernel's arguments are the fields of one struct, which its C++ file alone declares. A tape is for
kernels what a CUDA graph is for launches: it holds addresses and numbers. Whoever plays it keeps
the tensors alive whose addresses it has, and changes only what they hold.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvserve.kernels.build import load_library, source_of, why_missing

LARGEST_DIM = 256

Refusal = Callable[[int], Exception]
"""From what a kernel returned, if it is not 0, to the error that says so."""

_ALIGNED = 16
_PLAIN = frozenset((int, bool, float, type(None)))

_NUMBERS = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


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


class Compiled:
    """``kvserve_<name>`` of a C++ file, called with the fields of its struct."""

    def __init__(self, name: str, file: str | None = None) -> None:
        self.name, self.file = name, file or name

    @cached_property
    def _source(self) -> str:
        """Without comments."""
        return re.sub("//.*", "", source_of(self.file).read_text())

    @cached_property
    def _fields(self) -> type[ctypes.Structure]:
        struct = re.search(rf"kvserve_{self.name}\(const (\w+)\*", self._source)
        assert struct is not None, f"{self.file}.cpp has no {self.name} that reads a struct"
        return _struct(self._source, struct[1])

    def records(self, name: str, fields: Sequence[tuple[Any, ...]]) -> ctypes.Array[Any]:
        """Structs ``name`` side by side, for a field that points to them: keep them meanwhile."""
        struct = _struct(self._source, name)
        return (struct * len(fields))(*(struct(*_plain(each)) for each in fields))

    @cached_property
    def _fault(self) -> int:
        """Which field that is."""
        return [name for name, *_ in self._fields._fields_].index("fault")

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
        struct, refusal = self._fields, None
        if refused:
            fault = (ctypes.c_int64 * 2)()

            def refusal(code: int) -> Exception:
                words = refused if isinstance(refused, str) else refused[code]
                return IndexError(f"{self.name}: {words.format(*fault)}")

            fields = *fields[: self._fault], ctypes.addressof(fault), *fields[self._fault :]
        if len(fields) != len(struct._fields_):
            raise TypeError(f"{self.name}: {len(fields)} of {len(struct._fields_)} fields")
        # Most fields are numbers; a call of a function for each would be a third of the time.
        plain = [x if type(x) in _PLAIN else _plain(x) for x in fields]
        run(load_library(self.file, *defines), self.name, struct(*plain), refusal)


def slot_outside(num_blocks: int, block_size: int) -> str:
    """What is said of a slot that no block has."""
    return f"slot {{}} is not in a pool of {num_blocks} blocks of {block_size}"


def as_int64(x: Tensor) -> Tensor:
    """Dense int64."""
    return x.to(torch.int64).contiguous()


def _plain(x: Any) -> Any:
    """Tensors and records as their addresses, alone or in tuples."""
    if isinstance(x, tuple):
        return tuple([y if type(y) in _PLAIN else _plain(y) for y in x])
    if isinstance(x, ctypes.Array):
        return ctypes.addressof(x)
    return x.data_ptr() if isinstance(x, Tensor) else x


def _struct(source: str, name: str) -> type[ctypes.Structure]:
    """A struct of C++ ``source``, whose comments are gone: pointers, numbers, arrays, structs."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", source, re.DOTALL)
    assert body is not None, name
    fields = []
    for words in filter(str.strip, body[1].split(";")):
        kind, names = words.replace("const ", "").replace("* ", " *").split(maxsplit=1)
        for pointer, field, length in re.findall(r"(\*?)(\w+)(?:\[(\d+)\])?", names):
            plain: Any = ctypes.c_void_p if pointer else _NUMBERS.get(kind) or _struct(source, kind)
            fields.append((field, plain * int(length) if length else plain))
    return type(name, (ctypes.Structure,), {"_fields_": fields})
