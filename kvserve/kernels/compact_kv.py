"""Move kept entries to the front of their rows, all layers and heads in one pass."""

from __future__ import annotations

from torch import Tensor

from kvserve.kernels.gather_kv import entry_rows


def compact_kv(kv_cache: Tensor, src: Tensor, dst: Tensor) -> None:
    """Copy entries ``src`` to ``dst``, keys and values, in place.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; src, dst: int64 slots [L, Hkv, S]. All sources are
    read before any destination is written, so they may overlap.
    """
    block, heads, dim = kv_cache.shape[3:]
    flat = kv_cache.view(-1, dim)
    rows = entry_rows(kv_cache, src).view(-1)
    keys, values = flat.index_select(0, rows), flat.index_select(0, rows + block * heads)
    rows = entry_rows(kv_cache, dst).view(-1)
    flat.index_copy_(0, rows, keys)
    flat.index_copy_(0, rows + block * heads, values)
