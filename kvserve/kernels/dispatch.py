"""How Triton kernels are compiled, and which tiles they take on which generation of GPU.

Triton is imported by the first launch: a machine that only runs the torch references needs none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import torch

from kvserve.folders import install
from kvserve.kernels.tiles import FLOAT32_TILES, TILES, Tile

# Arguments that change from step to step: no code is compiled for particular values of them.
VARYING = {
    *("columns", "inner", "least", "length", "num_parts", "places", "splits", "tokens", "window"),
}
# Arguments that may begin anywhere in a larger tensor, as the prompts' part of a batch does: no
# code is compiled for addresses that are multiples of 16 bytes.
UNALIGNED = {
    *("always", "firsts", "last", "part_recent", "recent", "rows", "shares", "slots", "starts"),
    "sums",
}


def interprets() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Helper:
    """Decorates a function that Triton kernels call, in its module or in those that import it."""

    __call__: Callable[..., Any]  # in kernels alone, where Triton's own function replaces it

    def __init__(self, source: Callable[..., Any]) -> None:
        self.source = source


class Kernel:
    """Decorates the source of a Triton kernel, which finds ``tl`` among its module's names."""

    def __init__(self, source: Callable[..., None]) -> None:
        self.source = source

    @cached_property
    def compiler(self) -> Any:
        """The source as Triton's kernel, or as its interpreter's under ``TRITON_INTERPRET=1``."""
        try:
            import triton
        except ImportError as error:
            raise ImportError(f"GPU kernels need Triton: {install('cuda')}") from error
        _complete(self.source.__globals__)
        names = self.source.__code__.co_varnames[: self.source.__code__.co_argcount]
        return triton.jit(
            self.source,
            do_not_specialize=[name for name in names if name in VARYING],
            do_not_specialize_on_alignment=[name for name in names if name in UNALIGNED],
        )

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Run on a grid of programs, if it has any. ``options``: constants, ``num_warps``."""
        if all(grid):
            self.compiler[grid](*args, **options)


def _complete(module: dict[str, Any]) -> None:
    """Give a module with kernels the names that they use: ``tl``, and helpers as Triton's."""
    import triton
    import triton.language as tl

    helpers = {name: x.source for name, x in module.items() if isinstance(x, Helper)}
    module.update({name: triton.jit(source) for name, source in helpers.items()}, tl=tl)
    for source in helpers.values():
        _complete(source.__globals__)


def tile_of(kernel: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of ``kernel`` for numbers of ``dtype``; heads larger than 128 take fewer at once."""
    table = FLOAT32_TILES if dtype is torch.float32 else TILES[generation(device)]
    tile, part = table[kernel], max(1, head_dim // 128)
    return tile._replace(rows=max(16, tile.rows // part), columns=max(16, tile.columns // part))


@cache
def generation(device: torch.device) -> tuple[int, int]:
    """The newest that has tiles and is not newer than the device."""
    return max((known for known in TILES if known <= capability(device)), default=min(TILES))


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device; without one, Hopper's, whose code is then inspected."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; without one, an H100's."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
