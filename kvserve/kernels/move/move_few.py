"""Entries in few bits: read as numbers, and moved bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled, as_int64
from kvserve.kernels.store.few_bits import FewBlocks, bytes_at, entries_at
from kvserve.kernels.store.turning import turn_torch

_GATHER, _MOVE = (Compiled(name, "few_bits") for name in ("gather_few", "move_few"))


def gather_few_torch(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """Keys (or values) of ``layers [L']``, as they came but for their rounding: [L', Hkv, S, D].
    slots: int64 [L', Hkv, S]."""
    found = []
    for layer, own in zip(layers, slots, strict=True):
        held, mean = blocks.layer(layer)[int(values)], blocks.layers[layer].shaping.mean
        numbers = turn_torch(held.numbers(bytes_at(blocks, held, own)).transpose(0, 1))
        found.append((numbers if values else numbers + mean).transpose(0, 1))
    return torch.stack(found).to(dtype)


def move_few_torch(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """Copy entries, bit for bit, as ``move_kv_torch``: int64 slots [L, Hkv, S]."""
    for layer, source, target in zip(layers, src, dst, strict=True):
        for held in blocks.layer(layer):
            moved = bytes_at(blocks, held, source)
            held.tiles[entries_at(blocks, held, target)] = moved


def gather_few_cpu(
    blocks: FewBlocks, layers: list[int], slots: Tensor, dtype: torch.dtype, values: bool = False
) -> Tensor:
    """To float32 or bfloat16. ``IndexError`` as of the store."""
    slots = as_int64(slots)
    out = torch.empty(*slots.shape, blocks.dim, dtype=dtype)
    _check_layers(layers, slots)
    places = out, slots, *slots.shape, values, dtype is torch.bfloat16
    _GATHER(blocks.told(layers), *places, refused=blocks.slot_outside)
    return out


def move_few_cpu(
    blocks: FewBlocks, layers: list[int], src: Tensor, dst: Tensor, runs: int = 1
) -> None:
    """Entry after entry. ``IndexError`` as of the store."""
    if src.shape != dst.shape:
        raise ValueError(f"move_few: slots {list(src.shape)} to {list(dst.shape)}")
    _check_layers(layers, src)
    places = as_int64(src), as_int64(dst), *src.shape
    _MOVE(blocks.told(layers), *places, refused=blocks.slot_outside)


def _check_layers(layers: list[int], slots: Tensor) -> None:
    if len(layers) != len(slots):
        raise ValueError(f"few bits: slots {list(slots.shape)} of {len(layers)} layers")
