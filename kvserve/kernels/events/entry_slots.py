"""Slots of the entries that events read and move."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.cpu import slot_mapping as cpu
from kvserve.kernels.slot_mapping import slot_mapping


def slots_of_entries(
    block_tables: Tensor,
    rows: Tensor,
    entries: Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
    counts: Tensor | None = None,
) -> Tensor:
    """Slots of the ``entries`` of E table rows ``rows int64 [E]``, in L layers and H heads.

    block_tables: as of ``slot_mapping``; entries: int64 [E, L, H, S], where L and H may be 1 for
    entries that are as in all ``lanes`` = (L, H); below 0 they are as 0. Only the first ``counts``
    int64 [E, L, H] of a lane exist (default: all); others get slot 0. Returns int64 [L, H, E * S].
    """
    how = block_tables, rows, entries, lanes, block_tokens, counts
    return cpu.slots_of_entries(*how) if cpu.takes(block_tables) else slots_of_entries_torch(*how)


def slots_of_entries_torch(
    block_tables: Tensor,
    rows: Tensor,
    entries: Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
    counts: Tensor | None = None,
) -> Tensor:
    """The reference of ``slots_of_entries``."""
    each = entries.clamp(min=0).expand(len(rows), *lanes, -1)
    exist = None
    if counts is not None:
        place = torch.arange(entries.shape[-1], device=entries.device)
        exist = (place < counts[..., None]).expand_as(each)
        each = torch.where(exist, each, 0)

    def by_lane(x: Tensor) -> Tensor:
        return x.permute(1, 2, 0, 3).reshape(*lanes, -1)

    owners = rows.repeat_interleave(entries.shape[-1])
    slots = slot_mapping(block_tables, owners, by_lane(each), block_tokens)
    return slots if exist is None else torch.where(by_lane(exist), slots, 0)
