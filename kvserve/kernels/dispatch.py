"""How Triton kernels are compiled, and which tiles they take on which generation of GPU.

Triton is imported by the first launch: a machine that only runs the torch references needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch

# Arguments that change from step to step: no code is compiled for particular values of them.
VARYING = {"columns", "inner", "length", "places", "splits", "tokens", "window"}


class Helper:
    """Decorates a function that Triton kernels call, of its module or of those that import it."""

    __call__: Callable[..., Any]  # in kernels alone, where Triton's own stands in its place

    def __init__(self, source: Callable[..., Any]) -> None:
        self.source = source


class Kernel:
    """Decorates the source of a Triton kernel, which finds ``tl`` among its module's names."""

    def __init__(self, source: Callable[..., None]) -> None:
        self.source = source

    @cached_property
    def compiler(self) -> Any:
        """The source in Triton's hands, or in its interpreter's under ``TRITON_INTERPRET=1``."""
        try:
            import triton
        except ImportError as error:
            raise ImportError("GPU kernels need Triton: pip install 'kvserve[cuda]'") from error
        _complete(self.source.__globals__)
        names = self.source.__code__.co_varnames[: self.source.__code__.co_argcount]
        return triton.jit(self.source, do_not_specialize=[n for n in names if n in VARYING])

    def launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        """Run on a grid of programs, if there is one. ``options``: constants, ``num_warps``."""
        if all(grid):
            self.compiler[grid](*args, **options)


def _complete(module: dict[str, Any]) -> None:
    """Give a module that holds kernels what these name: ``tl``, and its helpers as Triton's."""
    import triton
    import triton.language as tl

    helpers = {name: x.source for name, x in module.items() if isinstance(x, Helper)}
    module.update({name: triton.jit(source) for name, source in helpers.items()}, tl=tl)
    for source in helpers.values():
        _complete(source.__globals__)


class Tile(NamedTuple):
    """What one program takes: ``rows`` (queries), ``columns`` (entries), warps, pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


# Chosen so that nothing spills (tests/kernels/budget.json holds them to it), not by time: no GPU
# has run them yet. Two-byte numbers, by the lowest compute capability that has these tiles:
_TILES = {
    (8, 0): {
        "decode": Tile(16, 64, 4, 2),
        "prefill": Tile(64, 64, 8, 2),
        "scores": Tile(64, 64, 4, 2),
    },
    (9, 0): {
        "decode": Tile(16, 64, 4, 3),
        "prefill": Tile(128, 64, 8, 2),
        "scores": Tile(64, 64, 4, 3),
    },
}
# float32 is multiplied exactly, outside of the tensor cores.
_FLOAT32_TILES = {
    "decode": Tile(16, 32, 4, 3),
    "prefill": Tile(32, 16, 8, 2),
    "scores": Tile(32, 32, 8, 1),
}


def tile_of(kernel: str, device: torch.device, head_dim: int, dtype: torch.dtype) -> Tile:
    """The tile of ``kernel`` for numbers of ``dtype``; heads larger than 128 take fewer at once."""
    if dtype is torch.float32:
        tile = _FLOAT32_TILES[kernel]
    else:
        older = [known for known in _TILES if known <= capability(device)]
        tile = _TILES[max(older, default=min(_TILES))][kernel]
    part = max(1, head_dim // 128)
    return tile._replace(rows=max(16, tile.rows // part), columns=max(16, tile.columns // part))


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a CUDA device; without one, Hopper's, whose code is then looked at."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; without one, an H100's."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
