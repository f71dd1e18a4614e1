"""Read scattered entries of all layers and heads at once."""

from __future__ import annotations

import torch
from torch import Tensor


def entry_rows(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Rows of ``kv_cache.view(-1, D)`` that hold keys; their values lie ``B * Hb`` rows behind.

    kv_cache: [num_blocks, Lb, 2, B, Hb, D]; slots: int64 [L', Hkv, S] of the layers
    ``layer_ids [L']`` (default: all of them). Returns the slots' shape.
    """
    _, layers, _, block, heads, _ = kv_cache.shape
    layer, head = _lane_places(slots, layer_ids, layers, heads)
    row = slots // block * (layers * 2 * block) + layer * (2 * block) + slots % block
    return row * heads + head


def gather_keys(kv_cache: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """slots: int64 [L', Hkv, S] of layers ``layer_ids`` -> keys [L', Hkv, S, D]."""
    dim = kv_cache.shape[-1]
    rows = entry_rows(kv_cache, slots, layer_ids).view(-1)
    return kv_cache.view(-1, dim).index_select(0, rows).view(*slots.shape, dim)


def gather_queries(query_log: Tensor, slots: Tensor, layer_ids: Tensor | None = None) -> Tensor:
    """Queries of layers ``layer_ids [L']`` (default: all): [L', Hlog, S, D].

    query_log: [num_blocks, Lb, tokens, Hb, D]; slots: int64 [L', Hlog, S], of the log.
    """
    _, layers, tokens, heads, dim = query_log.shape
    layer, head = _lane_places(slots, layer_ids, layers, heads)
    row = (slots // tokens * layers + layer) * tokens + slots % tokens
    rows = (row * heads + head).view(-1)
    return query_log.view(-1, dim).index_select(0, rows).view(*slots.shape, dim)


def _lane_places(
    slots: Tensor, layer_ids: Tensor | None, layers: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Each lane's layer and head inside its block, shaped to broadcast with [L', H, S]."""
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    layer = layer_ids % layers
    head = torch.arange(slots.shape[1], device=slots.device) % heads
    return layer[:, None, None], head[:, None]
