"""Read scattered entries of all layers and heads at once, and move kept ones to the front."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled, as_int64, slot_outside
from kvserve.kernels.store.quantized_entries import QuantizedVectors
from kvserve.kernels.store.remainder import Remainder, merged
from kvserve.kernels.store.slot_mapping import places_of, vectors_at

Vectors = Tensor | QuantizedVectors
"""Numbers, or levels with steps."""
Read = Callable[[Tensor, Any], Tensor]
"""Of slots [L', H, S] and the numbers of their layers (``None``: all of them)."""
_AT_ONCE = 300_000
"""Entries that are held at once, with 128 numbers of 16 bits some 300 MB."""
_GATHER_KV, _MOVE_KV, _MEAN_KV = (
    Compiled(name, "storage") for name in ("gather_kv", "move_kv", "mean_kv")
)


def gather_kv_torch(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """Keys (or values) in slots int64 [L', Hkv, S] of layers ``layer_ids [L']`` (default: all):
    [L', Hkv, S, D]; the reference. kv_cache: [num_blocks, Lb, 2, B, Hb, D]."""
    return gather_torch(kv_cache[:, :, int(values)], slots, layer_ids)


def gather_torch(held: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """The same of [num_blocks, Lb, tokens, Hb, D], as queries are logged; the reference."""
    return vectors_at(held, places_of(held.shape, slots, layer_ids))


def move_kv_torch(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Copy entries ``src`` to ``dst``, keys and values, in place; the reference: all sources are
    read before any destination is written.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; src, dst: int64 slots [L, Hkv, S], which are ``runs``
    runs (events) of equal length. They may overlap as entries do that move to the front in order:
    no destination is the source of a later entry of its run, or of any entry of another run. What
    goes to block 0 is not used.
    """
    move_torch(kv_cache[:, :, 0], kv_cache[:, :, 1], src, dst)


def move_torch(keys: Vectors, values: Vectors, src: Tensor, dst: Tensor) -> None:
    """Of numbers or levels [num_blocks, Lb, tokens, Hb, D], bit for bit."""
    source, target = (places_of(keys.shape, slots) for slots in (src, dst))
    for held in (keys, values):
        if isinstance(held, Tensor):
            held[target] = vectors_at(held, source)
        else:
            held[target] = held[source]


def gather_kv_cpu(
    kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None, values: bool = False
) -> Tensor:
    """``IndexError``, with nothing read, for a slot that is not there."""
    ids = None if layer_ids is None else as_int64(layer_ids)
    slots, sizes = as_int64(slots), _sizes_of(kv_cache)
    out = kv_cache.new_empty(*slots.shape, kv_cache.shape[-1])
    places = kv_cache, slots, None, ids, out, *slots.shape
    _GATHER_KV(*places, *sizes, values, refused=slot_outside(sizes[0], sizes[2]))
    return out


def move_kv_cpu(kv_cache: Tensor, src: Tensor, dst: Tensor, runs: int = 1) -> None:
    """Entry after entry. ``IndexError``, with nothing written, for a slot that is not there."""
    if src.shape != dst.shape:
        raise ValueError(f"move_kv: slots {list(src.shape)} to {list(dst.shape)}")
    sizes = _sizes_of(kv_cache)
    places = kv_cache, as_int64(src), as_int64(dst), None, None, *src.shape
    _MOVE_KV(*places, *sizes, False, refused=slot_outside(sizes[0], sizes[2]))


def mean_kv(kv_cache: Tensor, slots: Tensor, counts: Tensor, keys: Read, values: Read) -> Remainder:
    """``mean_of`` entries in slots int64 [L, H, E * S], which ``keys`` and ``values`` read where no
    kernel does. ``IndexError`` as of a gather."""
    if not _MEAN_KV.takes(kv_cache, torch.float32, torch.bfloat16, multiple=8):
        return mean_in_pieces(keys, values, slots, counts)
    sizes = _sizes_of(kv_cache)
    mean, fields = to_be_mean(slots, counts, kv_cache.shape[-1], kv_cache.dtype)
    _MEAN_KV(kv_cache, fields, *sizes, refused=slot_outside(sizes[0], sizes[2]))
    return mean


def mean_in_pieces(keys: Read, values: Read, slots: Tensor, counts: Tensor) -> Remainder:
    """``mean_of`` entries that are read for it: of as many layers at once as ``_AT_ONCE`` says, or
    of parts of one, since all that a long prompt drops would take some GB."""
    (layers, heads, length), runs = slots.shape, len(counts)
    each, room = max(1, length // runs), max(1, _AT_ONCE // (heads * runs))
    some, part = max(1, room // each), min(each, room)
    if some >= layers:
        return mean_of(keys(slots, None), values(slots, None), counts)

    def read(own: range, start: int) -> Remainder:
        lanes = slots[own.start : own.stop].unflatten(2, (runs, -1))[..., start : start + part]
        count = (counts[:, own.start : own.stop] - start).clamp(0, lanes.shape[3])
        lanes = lanes.flatten(2)
        return mean_of(keys(lanes, own), values(lanes, own), count)

    found = [
        reduce(merged, (read(own, start) for start in range(0, each, part)))
        for own in (range(layers)[first : first + some] for first in range(0, layers, some))
    ]
    return Remainder(*(torch.cat(pieces, dim=1) for pieces in zip(*found, strict=True)))


def mean_of(keys: Tensor, values: Tensor, counts: Tensor) -> Remainder:
    """The mean of the first ``counts`` int64 [E, L, H] of E runs of entries, [L, H, E * S, D], and
    the logarithm of their number: [E, L, H, ...]."""
    runs = len(counts)
    # [L, H, E, 1, S] beside [L, H, E, S, D], as they were gathered: a product by event would copy.
    share = torch.arange(keys.shape[2] // runs, device=keys.device) < counts[..., None]
    share = (share / counts[..., None].clamp(min=1)).movedim(0, 2)[..., None, :]
    key, value = (share @ x.unflatten(2, (runs, -1)).float() for x in (keys, values))
    bias = counts.float().log()
    return Remainder(key[..., 0, :].movedim(2, 0), value[..., 0, :].movedim(2, 0), bias)


def to_be_mean(
    slots: Tensor, counts: Tensor, dim: int, dtype: torch.dtype
) -> tuple[Remainder, tuple[object, ...]]:
    """As ``mean_of`` returns it, still to be written, and ``Means`` of the C++ file for that."""
    keys, values = torch.empty(2, *counts.shape, dim).unbind()
    mean = Remainder(keys, values, torch.empty(counts.shape))
    sizes = *counts.shape[1:], len(counts), slots.shape[2] // len(counts), dim
    return mean, (as_int64(slots), as_int64(counts), *mean, *sizes, dtype is torch.bfloat16)


def _sizes_of(kv_cache: Tensor) -> tuple[int, ...]:
    """Blocks, layers, entries and heads of a block, and bytes of a vector."""
    num_blocks, layers, _, size, heads, dim = kv_cache.shape
    if not kv_cache.is_contiguous():
        raise ValueError(f"move_kv: blocks of a cache {list(kv_cache.shape)} have to be dense")
    return num_blocks, layers, size, heads, dim * kv_cache.itemsize
