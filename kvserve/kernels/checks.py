"""What launchers refuse before anything runs, so that no kernel reads or writes outside the cache.

Shapes are always checked. What addresses hold is known to the device alone, and kernels pass over
those outside of the cache; ``KVSERVE_CHECK_ADDRESSES=1`` makes launchers wait for the device, look,
and refuse them.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128, 256)


def check_head_dim(*tensors: Tensor) -> None:
    """Raises ``ValueError`` unless all end in one supported, contiguous dimension."""
    dim = tensors[0].shape[-1]
    for x in tensors:
        if x.shape[-1] != dim or dim not in HEAD_DIMS or x.stride(-1) != 1:
            raise ValueError(
                f"the last dimension has to be head_dim, one of {HEAD_DIMS}, contiguous and the "
                f"same for all; got shape {list(x.shape)}, strides {list(x.stride())}"
            )


def _looks() -> bool:
    return os.environ.get("KVSERVE_CHECK_ADDRESSES") == "1"


def check_slots(slots: Tensor, num_blocks: int, block: int) -> None:
    """Raises ``IndexError`` if asked to look and a slot is not in the cache."""
    if not _looks():
        return
    outside = slots[(slots < 0) | (slots >= num_blocks * block)]
    if len(outside):
        raise IndexError(
            f"slot {int(outside[0])} of slots {list(slots.shape)} is not in a cache of "
            f"{num_blocks} blocks of {block}"
        )


def check_tables(
    tables: Tensor, rows: Tensor, last: Tensor, starts: Tensor | None, keys: Tensor
) -> None:
    """Raises ``IndexError`` if asked to look and a token sees a block that no row may hold.

    tables: [num_rows, R, M]; rows: [P]; last: [R, T]; starts: [P + 1] or ``None``, where P = T;
    keys: [num_blocks, B, ...]. Block 0, which freed columns name, is no row's.
    """
    if not _looks():
        return
    num_rows, _, columns = tables.shape
    num_blocks, block = keys.shape[:2]
    if starts is not None:
        rows = rows.repeat_interleave(starts.diff())
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise IndexError(
            f"rows {rows.unique().tolist()} are not all in tables {list(tables.shape)}"
        )
    if last.numel() and int(last.max()) >= columns * block:
        raise IndexError(
            f"entry {int(last.max())} is not in tables {list(tables.shape)} of blocks of {block}"
        )
    own = tables[rows]
    seen = torch.arange(columns, device=own.device) * block <= last.T[..., None]
    wrong = own[seen & ((own < 1) | (own >= num_blocks))]
    if len(wrong):
        raise IndexError(
            f"block {int(wrong[0])} in tables {list(tables.shape)} is not one that a row may hold, "
            f"of a cache {list(keys.shape)}"
        )
