"""From (row, physical position) to slots of the paged cache, for every lane at once."""

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
    group = torch.arange(lanes[0], device=rows.device) * groups // lanes[0]
    head = torch.arange(lanes[1], device=rows.device) * heads // lanes[1]
    column = torch.div(positions, block_tokens, rounding_mode="floor")
    row = (group[:, None, None] * num_rows + rows) * heads + head[:, None]
    blocks = block_tables.reshape(-1)[row * columns + column].long()
    return blocks * block_tokens + positions % block_tokens
