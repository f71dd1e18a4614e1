"""Entries held as levels: read as numbers, and moved bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled, as_int64
from kvserve.kernels.move.move_kv import Read, mean_in_pieces, move_torch, to_be_mean
from kvserve.kernels.store.quantized_entries import LevelKeys, QuantizedBlocks
from kvserve.kernels.store.remainder import Remainder
from kvserve.kernels.store.slot_mapping import places_of

_GATHER_LEVELS, _MOVE_LEVELS, _MEAN_LEVELS = (
    Compiled(name, "storage") for name in ("gather_levels", "move_levels", "mean_levels")
)


def gather_levels_torch(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """Keys (or values) as numbers, as ``gather_kv_torch``: [L', Hkv, S, D]."""
    held = blocks.values if values else blocks.keys
    return held[places_of(held.shape, slots, layer_ids)].widened(dtype)


def gather_levels_cpu(
    blocks: QuantizedBlocks,
    slots: Tensor,
    layer_ids: Tensor | None,
    dtype: torch.dtype,
    values: bool = False,
) -> Tensor:
    """To float32 or bfloat16. ``IndexError`` as of the store."""
    ids = None if layer_ids is None else as_int64(layer_ids)
    out = torch.empty(*slots.shape, blocks.keys.shape[-1], dtype=dtype)
    _GATHER_LEVELS(
        *(blocks.fields, out, None, as_int64(slots), ids),
        *(*slots.shape, values, dtype is torch.bfloat16),
        refused=blocks.slot_outside,
    )
    return out


def gather_key_levels_cpu(
    blocks: QuantizedBlocks, slots: Tensor, layer_ids: Tensor | None
) -> LevelKeys:
    """Keys of 8 bits with a sign as they are held: [L', Hkv, S, ...]. ``IndexError`` as of the
    store."""
    ids = None if layer_ids is None else as_int64(layer_ids)
    levels = torch.empty(*slots.shape, blocks.keys.shape[-1], dtype=torch.int8)
    steps = torch.empty(slots.shape)
    _GATHER_LEVELS(
        *(blocks.fields, levels, steps, as_int64(slots), ids),
        *(*slots.shape, False, False),
        refused=blocks.slot_outside,
    )
    return LevelKeys(levels, steps)


def mean_levels(
    blocks: QuantizedBlocks,
    slots: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
    keys: Read,
    values: Read,
) -> Remainder:
    """As ``mean_kv``, of numbers of ``dtype``."""
    takes = _MEAN_LEVELS.takes(blocks.pool, torch.uint8)
    if not takes or dtype not in (torch.float32, torch.bfloat16) or blocks.keys.shape[-1] % 8:
        return mean_in_pieces(keys, values, slots, counts)
    mean, fields = to_be_mean(slots, counts, blocks.keys.shape[-1], dtype)
    _MEAN_LEVELS(blocks.fields, fields, refused=blocks.slot_outside)
    return mean


def move_levels_torch(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """As ``move_kv_torch``."""
    move_torch(blocks.keys, blocks.values, src, dst)


def move_levels_cpu(blocks: QuantizedBlocks, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Entry after entry. ``IndexError`` as of the store."""
    if src.shape != dst.shape:
        raise ValueError(f"move_levels: slots {list(src.shape)} to {list(dst.shape)}")
    places = as_int64(src), as_int64(dst), *src.shape
    _MOVE_LEVELS(blocks.fields, *places, refused=blocks.slot_outside)
