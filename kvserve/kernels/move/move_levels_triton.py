"""``move_levels.py`` in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.move.move_kv_triton import gather_triton, move_triton
from kvserve.kernels.store.quantized_entries import QuantizedBlocks


def gather_levels_triton(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """Entries of slots outside of the cache are 0."""
    held = blocks.values if values else blocks.keys
    return gather_triton(held, slots, layer_ids, dtype)


def move_levels_triton(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """As ``move_kv_triton``."""
    move_triton(blocks.keys, blocks.values, src, dst, runs)
