"""What events do to rows, beside scoring: where entries lie, which move, what is left of others."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.cpu import moved_entries as cpu_moved_entries
from kvserve.kernels.cpu import remainder as cpu_remainder
from kvserve.kernels.cpu import slot_mapping as cpu_slot_mapping
from kvserve.kernels.remainder import Remainder, merged
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
    takes = cpu_slot_mapping.takes(block_tables)
    return (cpu_slot_mapping.slots_of_entries if takes else slots_of_entries_torch)(*how)


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


def moved_entries(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The entries that come, in order, to ``length`` places of each lane: int64 [E, L, H, length].

    kept: int64 [E, L, H, C], the entries that events keep. ``numbers`` int64 [5, E, L, H] are, of
    each lane: the entry of its first place; places before those of kept ones, whose entries stay;
    how many of ``kept`` count; how many entries fewer there are; and how many places exist, behind
    which there is entry 0. Places behind those of kept entries take what came behind them.
    """
    if cpu_moved_entries.takes(kept):
        return cpu_moved_entries.moved_entries(kept, numbers, length)
    return moved_entries_torch(kept, numbers, length)


def moved_entries_torch(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The reference of ``moved_entries``."""
    start, before, chosen, evicted, counts = numbers[..., None].unbind()
    place = torch.arange(length, device=kept.device)
    src = start + place + evicted
    if kept.shape[-1]:
        rank = (place - before).clamp(0, kept.shape[-1] - 1)
        src = torch.where(place < before + chosen, kept.gather(-1, rank), src)
    src = torch.where(place < before, start + place, src)
    return torch.where(place < counts, src, 0)


def add_remainders(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """Merge ``more [E, L, Hkv, ...]`` into ``whole [L, num_rows, Hkv, ...]`` at ``rows [E]``."""
    if cpu_remainder.takes(whole.keys):
        cpu_remainder.add_remainders(whole, rows, more)
    else:
        add_remainders_torch(whole, rows, more)


def add_remainders_torch(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """The reference of ``add_remainders``."""
    by_layer = Remainder(*(part.transpose(0, 1) for part in more))
    for part, new in zip(whole, merged(whole.at(slice(None), rows), by_layer), strict=True):
        part[:, rows] = new.to(part.dtype)
