"""The tensors of a checkpoint's files, memory-mapped and read in pieces.

The pages of a map count as the process's memory for as long as it stays open, so files are mapped
anew once a piece's bytes were read, and not for each tensor: one with thousands opens in 20 ms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvserve.engine.models.hub import SOURCES, read_json
from kvserve.log import ConfigError, shown

_FETCH, _MOST_READ = "fetch it again", 32 * 2**20
_BELOW_BYTES = ("F4", "F6_E2M3", "F6_E3M2")
"""Types of safetensors 0.8 of which it can read no slice, and torch 2.13 has no values."""
_SHARD = re.compile(r"(.+)-(\d+)-of-(\d+)\.safetensors")


class Checkpoint(Protocol):
    """Tensors by name. Raises ``ConfigError`` for files that are missing or damaged."""

    @property
    def path(self) -> Path: ...

    @property
    def names(self) -> set[str]: ...

    def file(self, name: str) -> Path: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor:
        """A small tensor as a copy."""
        ...

    def pieces(
        self, name: str, rows: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[slice, Tensor]]:
        """A region of the tensor, and nothing else of it, at most ``rows`` at a time.

        Each piece comes with its rows' place in the tensor, and is valid until the next one is
        asked for.
        """
        ...


@runtime_checkable
class Blocks(Protocol):
    """A checkpoint of GGUF's blocks."""

    def kind(self, name: str) -> str:
        """GGUF's name of the type that a tensor is stored in."""
        ...

    def blocks(self, name: str, rows: slice) -> np.ndarray[Any, Any]:
        """Rows as they are stored, uint8 [rows, bytes of a row]."""
        ...


def open_checkpoint(path: Path) -> Checkpoint:
    """A directory with safetensors, or a GGUF file."""
    if path.is_dir():
        return SafetensorsFiles(path)
    return cast(Checkpoint, SOURCES[path.suffix].tensors(path))


class SafetensorsFiles:
    """A ``Checkpoint`` in one file, or in shards with their index."""

    def __init__(self, path: Path, name_of: Callable[[str], str | None] = str) -> None:
        """``name_of``: what a stored tensor is called here; those without a name are
        ``left_out``."""
        self.path = path
        self.left_out: list[str] = []
        self._stored: dict[str, tuple[Path, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open, self._read = dict[Path, Any](), 0
        for shard in _shards(path):
            with _named(shard), safe_open(shard, framework="pt") as file:
                sizes = [(key, file.get_slice(key).get_shape()) for key in list(file.keys())]
            for stored, shape in sizes:
                if (name := name_of(stored)) is None:
                    self.left_out.append(stored)
                elif name in self._stored:
                    raise ConfigError(
                        f"--model: {shard} and {self._stored[name][0]} both have a tensor {name}; "
                        "remove what is left of another checkpoint"
                    )
                else:
                    self._stored[name], self._shapes[name] = (shard, stored), tuple(shape)

    @cached_property
    def names(self) -> set[str]:
        return set(self._stored)

    def file(self, name: str) -> Path:
        return self._stored[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        shard, stored = self._stored[name]
        with self._reading(shard) as file:
            _slice(file, stored, shard)
            values = file.get_tensor(stored).clone()
            self._read += values.nbytes
            return values

    def slices(self, opened: ExitStack) -> dict[str, Any]:
        """All tensors, each read when it is asked for, while the files in ``opened`` are open."""
        shards = sorted({shard for shard, _ in self._stored.values()})
        files = {at: opened.enter_context(safe_open(at, framework="pt")) for at in shards}
        return {name: _slice(files[at], stored, at) for name, (at, stored) in self._stored.items()}

    def pieces(
        self, name: str, rows: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[slice, Tensor]]:
        shard, stored = self._stored[name]
        for start in range(region[0].start, region[0].stop, rows):
            part = slice(start, min(start + rows, region[0].stop))
            with self._reading(shard) as file:
                values = _slice(file, stored, shard)[(part, *region[1:])]
                self._read += values.nbytes
            yield part, values

    @contextmanager
    def _reading(self, shard: Path) -> Iterator[Any]:
        """The file, opened anew once a piece's bytes were read."""
        if self._read > _MOST_READ:
            self._open, self._read = {}, 0
        with _named(shard):
            if shard not in self._open:
                self._open[shard] = safe_open(shard, framework="pt")
            yield self._open[shard]


def _shards(directory: Path) -> list[Path]:
    """The files with the weights: those of the index, the one file, or all shards there are."""
    index, one = directory / "model.safetensors.index.json", directory / "model.safetensors"
    shards = [one]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"--model: {index} has no weight_map; {_FETCH}")
        outside = [name for name in weight_map.values() if not _is_beside(name)]
        if outside:
            raise ConfigError(f"--model: {index} names {shown(outside[0])}, no file beside it")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
    elif not one.exists():
        found = [match for file in directory.iterdir() if (match := _SHARD.fullmatch(file.name))]
        wholes = sorted({(match[1], match[3]) for match in found})
        if len(wholes) > 1:
            several = " and ".join(f"{prefix}-...-of-{count}" for prefix, count in wholes)
            raise ConfigError(
                f"--model: {directory} has shards {several}, and no {index.name} that says "
                f"which are the model's; {_FETCH}"
            )
        for prefix, count in wholes:
            places = range(1, int(count) + 1)
            names = (f"{prefix}-{place:0{len(count)}}-of-{count}.safetensors" for place in places)
            shards = []
            for name in names:
                shards.append(directory / name)
                if not shards[-1].exists():  # it is named; the count may be any number
                    break
    for shard in shards:
        if not shard.exists():
            others = "" if shard != one or index.exists() else f" and so is {index.name}"
            raise ConfigError(
                f"--model: {shard} is missing{others}; {_FETCH} (kvserve reads safetensors and "
                "GGUF), or take random weights with --load-format dummy"
            )
    return shards


def _slice(file: Any, name: str, shard: Path) -> Any:
    found = file.get_slice(name)
    if (kind := found.get_dtype()) in _BELOW_BYTES:
        raise ConfigError(
            f"--model: {name} in {shard} is of type {kind}, which is not read; kvserve reads such "
            "numbers packed in bytes, as quantization_config says"
        )
    return found


def _is_beside(name: object) -> bool:
    """Whether this is the name of a file in a checkpoint's folder, or in one in it."""
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    path = PurePath(name)
    return not path.is_absolute() and ".." not in path.parts


@contextmanager
def _named(shard: Path) -> Iterator[None]:
    """Errors say which file is damaged."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--model: {shard} is damaged ({error}); {_FETCH}") from error
