"""The tensors of a checkpoint's files, memory-mapped and read in pieces.

The pages of a map count as the process's memory for as long as it stays open, so every piece maps
its file anew: loading then takes the model's own memory and that of one piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvserve.engine.models.hub import read_json
from kvserve.log import ConfigError

_FETCH = "fetch it again"
_BELOW_BYTES = ("F4", "F6_E2M3", "F6_E3M2")
"""Types of safetensors 0.8 of which it can read no slice, and torch 2.13 has no values."""


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
    from kvserve.engine.gguf.tensors import GgufTensors

    return GgufTensors(path)


class SafetensorsFiles:
    """A ``Checkpoint`` in one file, or in shards with their index."""

    def __init__(self, path: Path, name_of: Callable[[str], str | None] = str) -> None:
        """``name_of``: what a stored tensor is called here; those without a name are
        ``left_out``."""
        self.path = path
        self.left_out: list[str] = []
        self._stored: dict[str, tuple[Path, str]] = {}
        for shard in _shards(path):
            with _open_shard(shard) as file:
                stored_names = list(file.keys())
            for stored in stored_names:
                if (name := name_of(stored)) is None:
                    self.left_out.append(stored)
                else:
                    self._stored[name] = shard, stored

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def file(self, name: str) -> Path:
        return self._stored[name][0]

    def shape(self, name: str) -> tuple[int, ...]:
        shard, stored = self._stored[name]
        with _open_shard(shard) as file:
            return tuple(file.get_slice(stored).get_shape())

    def tensor(self, name: str) -> Tensor:
        shard, stored = self._stored[name]
        with _open_shard(shard) as file:
            _slice(file, stored, shard)
            return file.get_tensor(stored).clone()

    def pieces(
        self, name: str, rows: int, region: tuple[slice, ...]
    ) -> Iterator[tuple[slice, Tensor]]:
        shard, stored = self._stored[name]
        for start in range(region[0].start, region[0].stop, rows):
            part = slice(start, min(start + rows, region[0].stop))
            with _open_shard(shard) as file:
                yield part, _slice(file, stored, shard)[(part, *region[1:])]


def _shards(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ConfigError(f"--model: {index} has no weight_map; {_FETCH}")
        names = sorted(set(weight_map.values()))
    shards = [directory / name for name in names]
    for shard in shards:
        if not shard.exists():
            others = "" if index.exists() else " and so is model.safetensors.index.json"
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


@contextmanager
def _open_shard(shard: Path) -> Iterator[Any]:
    try:
        with safe_open(shard, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--model: {shard} is damaged ({error}); {_FETCH}") from error
