"""What a GGUF file says, and where its tensors lie; every count is checked against its length.

The package ``gguf`` has the types and their dequantisation. Its reader is not used: it believes
the file, and makes an array of every token (20 s for Gemma's 262,144, where this takes .3 s).
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from kvserve.log import ConfigError, shown

# struct's letters of the metadata's types; 8 is a string and 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MOST_DIMS = 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: ``shape`` in torch's order, its type, and its first byte's place."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int

    @property
    def row_bytes(self) -> int:
        weights, size = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // weights * size


@dataclass(frozen=True)
class GgufFile:
    """``metadata`` without its arrays of strings, which ``strings`` reads; tensors by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    arrays: Mapping[str, tuple[int, int]]
    """Of each array of strings its place and its length."""

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"--model: {self.path} {problem}")

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """``default`` if it is absent; ``ConfigError`` if it is of another type."""
        found = self.metadata.get(key)
        if found is None:
            return default
        if not isinstance(found, kind):
            raise self.error(f"sets {key} to {shown(found)}, which is no {kind.__name__}")
        return found

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty if it is absent."""
        place, count = self.arrays.get(key, (0, 0))
        with _mapped(self.path) as content:
            spans = _FileCursor(self.path, content, place).spans(count)
            return [content[start:stop].decode(errors="replace") for start, stop in spans]

    def blocks(self, name: str, rows: slice | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rows as they are stored, a copy: uint8 [rows, bytes of a row]. The file is mapped for
        this call alone, since pages of a map count as the process's memory while it is open."""
        tensor = self.tensors[name]
        shape = prod(tensor.shape[:-1]), tensor.row_bytes
        stored = np.memmap(self.path, np.uint8, "r", offset=tensor.start, shape=shape)
        return np.array(stored[rows])


def numbers(blocks: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Dequantise rows: uint8 [rows, bytes of a row] -> float32 [rows, columns]."""
    # As one row: `dequantize` takes 16 rows at a time, and each time takes its own overhead.
    values = dequantize(blocks.reshape(1, -1), kind)
    return values.astype(np.float32, copy=False).reshape(len(blocks), -1)


def read_gguf(path: Path) -> GgufFile:
    """``ConfigError`` for a file that is damaged, or that has tensors of a type not read."""
    with _mapped(path) as content:
        return _read(path, _FileCursor(path, content, 0))


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    try:
        with path.open("rb") as file:
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        raise ConfigError(f"--model: cannot read {path} ({error}); fetch it again") from None
    with content:
        yield content


class _FileCursor:
    """Reads a file from ``place`` on, and never beyond its end."""

    def __init__(self, path: Path, content: mmap.mmap, place: int) -> None:
        self._path, self._content, self.place = path, content, place

    def damaged(self, what: str) -> ConfigError:
        return ConfigError(f"--model: {self._path} is damaged ({what}); fetch it again")

    @property
    def left(self) -> int:
        return len(self._content) - self.place

    def skip(self, size: int, what: str) -> int:
        """The place before the bytes that are left behind."""
        if size > self.left:
            raise self.damaged(f"{what} of {size:,} bytes at byte {self.place:,} passes its end")
        self.place += size
        return self.place - size

    def numbers(self, letters: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{letters}")
        return struct.unpack_from(f"<{letters}", self._content, self.skip(size, "a number"))

    def count(self, what: str, least: int) -> int:
        """How many follow of what has at least so many bytes each."""
        (count,) = self.numbers("Q")
        if count * least > self.left:
            raise self.damaged(f"{count:,} {what} do not fit in it")
        return int(count)

    def array(self, key: str, letter: str) -> np.ndarray[Any, Any]:
        size = struct.calcsize(letter)
        count = self.count(f"numbers of {key}", size)
        place = self.skip(count * size, key)
        return np.frombuffer(self._content[place : self.place], f"<{letter}")

    def text(self) -> str:
        ((start, stop),) = self.spans(1)
        return self._content[start:stop].decode(errors="replace")

    def spans(self, count: int) -> list[tuple[int, int]]:
        """Where so many texts begin and end."""
        spans, place, end = [], self.place, len(self._content)
        for _ in range(count):
            if place + 8 > end:
                raise self.damaged(f"it ends at byte {end:,}, where a text should begin")
            (size,) = _LENGTH.unpack_from(self._content, place)
            start, place = place + 8, place + 8 + size
            if place > end:
                raise self.damaged(f"a text of {size:,} bytes at byte {start:,} passes its end")
            spans.append((start, place))
        self.place = place
        return spans


def _read(path: Path, cursor: _FileCursor) -> GgufFile:
    if (magic := cursor.numbers("4s")[0]) != b"GGUF":
        raise ConfigError(f"--model: {path} is no GGUF file: it begins with {magic!r}")
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        why = "its bytes are in the other order" if version > 0xFFFF else f"version {version}"
        raise ConfigError(f"--model: {path}: {why}; kvserve reads GGUF 2 and 3, little-endian")
    num_tensors, num_keys = cursor.count("tensors", 24), cursor.count("keys", 13)
    metadata: dict[str, Any] = {}
    arrays: dict[str, tuple[int, int]] = {}
    for _ in range(num_keys):
        key = cursor.text()
        if key in metadata or key in arrays:
            raise cursor.damaged(f"{key} is there twice")
        (kind,) = cursor.numbers("I")
        if kind in _SCALARS:
            (metadata[key],) = cursor.numbers(_SCALARS[kind])
        elif kind == _STRING:
            metadata[key] = cursor.text()
        elif kind == _ARRAY:
            (kind,) = cursor.numbers("I")
            if kind == _STRING:
                count = cursor.count(f"texts of {key}", 8)
                arrays[key] = cursor.place, count
                cursor.spans(count)
            elif kind in _SCALARS:
                metadata[key] = cursor.array(key, _SCALARS[kind])
            else:
                raise cursor.damaged(f"{key} is an array of type {kind}")
        else:
            raise cursor.damaged(f"{key} is of type {kind}")
    return GgufFile(path, metadata, _read_tensors(path, cursor, num_tensors, metadata), arrays)


def _read_tensors(
    path: Path, cursor: _FileCursor, count: int, metadata: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The table of tensors, whose places in the file are checked."""
    entries: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
    for _ in range(count):
        name = cursor.text()
        if name in entries:
            raise cursor.damaged(f"tensor {name} is there twice")
        (dims,) = cursor.numbers("I")
        if not 1 <= dims <= _MOST_DIMS:
            raise cursor.damaged(f"tensor {name} has {dims} dimensions")
        *sizes, kind, start = cursor.numbers(f"{dims}QIQ")
        entries[name] = tuple(reversed(sizes)), _kind(path, name, kind), start
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20 or alignment % 8:
        raise cursor.damaged(f"general.alignment is {alignment}")
    data = -(-cursor.place // alignment) * alignment
    tensors, free = {}, data
    for name, (shape, kind, start) in sorted(entries.items(), key=lambda item: item[1][2]):
        tensors[name] = tensor = StoredTensor(shape, kind, data + start)
        if not all(shape) or shape[-1] % GGML_QUANT_SIZES[kind][0]:
            raise cursor.damaged(f"tensor {name} has shape {shape} in {kind.name}")
        if start % alignment or tensor.start < free:
            raise cursor.damaged(f"tensor {name} begins inside of another, or is not aligned")
        free = tensor.start + prod(shape[:-1]) * tensor.row_bytes
        if free > cursor.place + cursor.left:
            raise cursor.damaged(f"tensor {name} passes its end")
    return tensors


def _kind(path: Path, name: str, number: int) -> GGMLQuantizationType:
    """The type of a tensor, which can be dequantised."""
    if (refusal := _refusal(number)) is not None:
        raise ConfigError(
            f"--model: {path} has tensor {name} in {refusal}; fetch another quantisation"
        )
    return GGMLQuantizationType(number)


@cache
def _refusal(number: int) -> str | None:
    """Why a tensor of this type is not read, if so."""
    try:
        kind = GGMLQuantizationType(number)
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except ValueError:
        return f"ggml type {number}, which the installed gguf does not know"
    except NotImplementedError:
        return f"{kind.name}, which gguf does not dequantise"
    return None
