"""How large the counts of a config.json may be: as large as its files can hold.

They are looked at before anything else reads them: lists of layers, and matrices, are made of them
long before a tensor turns out to be missing.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvserve.log import ConfigError, shown

_LENGTH = struct.Struct("<Q")
_SIZES = ("_size", "_dim", "_heads", "_rank")
MOST = 2**31 - 1
"""Of anything: positions and places are integers of 32 bits."""


@dataclass(frozen=True)
class Held:
    """What there is: so many tensors, of so many experts, in so many bits. Without files, more than
    any model has."""

    tensors: int = 10_000
    experts: int = 10_000
    bits: int = MOST
    where: str = "a model has"

    @classmethod
    def of(cls, shapes: list[Sequence[int]], size: int) -> Held:
        """``shapes`` of all tensors, in files of ``size`` bytes."""
        fused = max((shape[0] for shape in shapes if len(shape) > 2), default=0)
        return cls(len(shapes), max(len(shapes), fused), 8 * size, "its files hold")


def held_in(directory: Path) -> Held:
    """By the heads of its safetensors; those that cannot be read are refused where they are."""
    shapes, size = list[Sequence[int]](), 0
    broken = OSError, struct.error, ValueError, TypeError, LookupError, AttributeError
    for file in directory.glob("*.safetensors"):
        with suppress(*broken, RecursionError):
            length = file.stat().st_size
            with file.open("rb") as stream:
                (head,) = _LENGTH.unpack(stream.read(_LENGTH.size))
                found = json.loads(stream.read(min(head, length)))
            found.pop("__metadata__", None)
            shapes += [[int(size) for size in tensor["shape"]] for tensor in found.values()]
            size += length
    return Held.of(shapes, size) if shapes else Held()


def check_counts(raw: Mapping[str, Any], held: Held, where: str) -> None:
    """Refuse the first count in a config, or in a part of it, that is more than is ``held``."""
    parts = [raw]
    while parts:  # however deep they are
        for name, value in parts.pop().items():
            most = _bound(name, held)
            if isinstance(value, Mapping):
                parts.append(value)
            elif most is not None and isinstance(value, int) and value > most:
                raise ConfigError(
                    f"--model: {where} sets {name} to {shown(value)}, and {held.where} at most "
                    f"{most}"
                )


def _bound(name: str, held: Held) -> int | None:
    if name.endswith(("layers", "layer")) and not name.startswith("max_"):
        return held.tensors
    if name.endswith("experts"):
        return held.experts
    if name.endswith(_SIZES):
        return min(held.bits, MOST)
    return MOST if name.endswith("_position_embeddings") else None
