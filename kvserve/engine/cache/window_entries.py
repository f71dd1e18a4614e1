"""Entries of layers with windows whose heads are of another number or size than those of the layers
that see all tokens, in the same pool: a block is one range of bytes, and holds either."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvserve.engine.cache.entry_store import RawEntries
from kvserve.engine.cache.level_entries import QuantizedEntries
from kvserve.entry_format import EntryFormat
from kvserve.kernels.storage import StorageKernels
from kvserve.kernels.store.quantized_entries import QuantizedBlocks
from kvserve.scheduler.layout import KVLayout


def window_entries(
    kv: Tensor, layout: KVLayout, form: EntryFormat, kernels: StorageKernels, dtype: torch.dtype
) -> RawEntries:
    """Blocks ``kv [num_blocks, ...]`` as layers with windows see them: ``[num_blocks, layers, 2, B,
    heads, D]`` of ``layout.windows``, or levels of these. Bytes behind are not used."""
    own, size = layout.windows, layout.block_size
    assert own is not None
    if not form.quantized:
        shape = own.layers_per_block, 2, size, own.heads_per_block, own.head_dim
        return RawEntries(kv.flatten(1)[:, : math.prod(shape)].unflatten(1, shape), kernels)
    layer = form.block_bytes(size, own.head_dim, 1, own.heads_per_block)
    held = kv.flatten(1)[:, : own.layers_per_block * layer]
    held = held.unflatten(1, (own.layers_per_block, layer))
    return QuantizedEntries(QuantizedBlocks(held, form, size, own.head_dim), kernels, dtype)
