"""From (row, physical position) to slots of the paged cache, for every lane at once; and from slots
to what blocks hold, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def slot_mapping(
    block_tables: Tensor, rows: Tensor, positions: Tensor, block_tokens: int
) -> Tensor:
    """Slots of entry ``positions[a, h, s]`` of table row ``rows[s]``.

    block_tables: int [LG, num_rows, R, M]; rows: int64 [S]; positions: int64 [A, H, S], where A is
    a multiple of LG (layer a reads group a // (A / LG)) and H of R likewise. Returns int64
    [A, H, S]: block * block_tokens + offset.
    """
    groups, num_rows, heads, columns = block_tables.shape
    lanes = positions.shape[:2]
    row = rows
    if groups * heads > 1:
        group = torch.arange(lanes[0], device=rows.device) * groups // lanes[0]
        head = torch.arange(lanes[1], device=rows.device) * heads // lanes[1]
        row = (group[:, None, None] * num_rows + rows) * heads + head[:, None]
    column = torch.div(positions, block_tokens, rounding_mode="floor")
    blocks = block_tables.reshape(-1)[row * columns + column]
    return torch.add(positions % block_tokens, blocks, alpha=block_tokens)


def places_of(
    shape: torch.Size, slots: Tensor, layer_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices of what is held as [num_blocks, Lb, tokens, Hb, ...], for slots int64 [L', H, S] of
    the layers ``layer_ids [L']`` (default: all of them)."""
    _, layers, tokens, heads, *_ = shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    head = torch.arange(slots.shape[1], device=slots.device) % heads
    return slots // tokens, (layer_ids % layers)[:, None, None], slots % tokens, head[:, None]


def vectors_at(held: Tensor, at: tuple[Tensor, ...]) -> Tensor:
    """``held[at]`` of the leading dimensions. Whole rows are copied several times as fast."""
    width, strides = held.shape[-1], held.stride()[:-1]
    if any(stride % width for stride in strides):  # blocks of bytes, the last of which are unused
        return held[at]
    apart = [stride // width for stride in strides]
    last = sum((n - 1) * step for n, step in zip(held.shape, apart, strict=False))
    rows = sum((i * step for i, step in zip(at, apart, strict=True)), at[0].new_zeros(()))
    flat = held.as_strided((last + 1, width), (width, 1))
    return flat.index_select(0, rows.flatten()).view(*rows.shape, width)


def by_row(x: Tensor, slots: Tensor) -> Tensor:
    """New entries [T, R * Hb, ...] for slots [R, T]: [R, T, Hb, ...]."""
    return x.unflatten(1, (len(slots), -1)).transpose(0, 1)
