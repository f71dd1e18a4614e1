"""What events do to rows, beside scoring: where entries lie, which move, what is left of others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled, as_int64
from kvserve.kernels.store.remainder import Remainder, merged
from kvserve.kernels.store.slot_mapping import slot_mapping

_SLOT_MAPPING, _EVENT_SLOTS, _ADD_REMAINDERS = (
    Compiled(name, "events") for name in ("slot_mapping", "event_slots", "add_remainders")
)


def slots_of_entries(
    block_tables: Tensor,
    rows: Tensor,
    entries: Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
) -> Tensor:
    """Slots of the ``entries`` of E table rows ``rows int64 [E]``, in L layers and H heads.

    block_tables: as of ``slot_mapping``; entries: int64 [E, L, H, S], where L and H may be 1 for
    entries that are as in all ``lanes`` = (L, H); below 0 they are as 0. Returns int64
    [L, H, E * S]. ``IndexError`` of the kernel for a row or an entry that is not there.
    """
    if not _SLOT_MAPPING.takes(block_tables, torch.int32):
        return slots_of_entries_torch(block_tables, rows, entries, lanes, block_tokens)
    tables, rows = block_tables.contiguous(), as_int64(rows)
    count, length = len(rows), entries.shape[-1]
    wide = entries.to(torch.int64).expand(count, *lanes, -1)
    out = torch.empty(*lanes, count * length, dtype=torch.int64)
    outside = f"is not in {tables.shape[1]} rows of {tables.shape[3]} blocks of {block_tokens}"
    _SLOT_MAPPING(
        *(tables, rows, wide, out, wide.stride(), wide.shape, tables.shape, block_tokens),
        refused={1: f"row {{}} {outside}", 2: f"entry {{}} {outside}"},
    )
    return out


def slots_of_entries_torch(
    block_tables: Tensor,
    rows: Tensor,
    entries: Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
    counts: Tensor | None = None,
) -> Tensor:
    """The reference of ``slots_of_entries``; only the first ``counts`` int64 [E, L, H] of a lane
    exist (default: all), others get slot 0."""
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


class Moves(NamedTuple):
    """E events that keep entries ``kept``; ``numbers`` int64 [7, E, L, H] as of ``moved_entries``,
    the last three as of ``dropped_entries``.

    Looked for are ``moved`` places of each lane, and ``lost`` entries that go. ``tables`` are as of
    ``slot_mapping``, of the ``rows [E]``; ``new_tables`` int32 [LG, E, R, M] are afterwards those
    from the block of the first place on.
    """

    kept: Tensor
    numbers: Tensor
    moved: int
    lost: int
    tables: Tensor
    rows: Tensor
    new_tables: Tensor
    block_tokens: int


def event_slots(moves: Moves) -> tuple[Tensor, Tensor, Tensor]:
    """Slots that events move entries from, and to, int64 [L, H, E * moved], and of entries that
    they drop, [L, H, E * lost]. Places that do not exist get slot 0; behind the last entry that is
    dropped is the first one that might have been. ``IndexError`` as of ``slots_of_entries``."""
    if not _EVENT_SLOTS.takes(moves.tables, torch.int32):
        return event_slots_torch(moves)
    kept, _, moved, lost, *_, size = moves
    tables, new_tables = moves.tables.contiguous(), moves.new_tables.contiguous()
    numbers, rows = as_int64(moves.numbers), as_int64(moves.rows)
    events, *lanes, num_kept = kept.shape
    src, dst, dropped = (rows.new_empty(*lanes, events * each) for each in (moved, moved, lost))
    _, num_rows, _, columns = tables.shape
    new_columns = new_tables.shape[-1]
    _EVENT_SLOTS(
        *(kept, numbers, tables, rows, new_tables, src, dst, dropped, kept.stride()),
        *(events, *lanes, num_kept, moved, lost, *tables.shape, new_columns, size),
        refused={
            1: f"row {{}} is not in {num_rows} rows of {columns} blocks of {size}",
            2: f"entry {{}} is not in {columns} or {new_columns} blocks of {size}",
        },
    )
    return src, dst, dropped


def event_slots_torch(moves: Moves) -> tuple[Tensor, Tensor, Tensor]:
    """The reference of ``event_slots``."""
    kept, numbers, moved, lost, tables, rows, new_tables, size = moves
    start, counts, lanes = numbers[0], numbers[3], (kept.shape[1], kept.shape[2])
    src = dst = dropped = rows.new_empty(*lanes, 0)
    if moved:
        entries = moved_entries(kept, numbers, moved)
        src = slots_of_entries_torch(tables, rows, entries, lanes, size, counts)
        ends = start[:, :1, :1, None] % size + torch.arange(moved, device=kept.device)
        own = torch.arange(len(rows), device=kept.device)
        dst = slots_of_entries_torch(new_tables, own, ends, lanes, size, counts)
    if lost:
        entries = dropped_entries(kept, numbers[4:], lost)
        dropped = slots_of_entries_torch(tables, rows, entries, lanes, size)
    return src, dst, dropped


def moved_entries(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The entries that come, in order, to ``length`` places of each lane: int64 [E, L, H, length].

    kept: int64 [E, L, H, C], the entries that events keep. ``numbers`` int64 [7, E, L, H] are, of
    each lane: the entry of its first place; places before those of kept ones, whose entries stay;
    how many entries fewer there are; how many places exist, behind which there is entry 0; and,
    the last one, how many of ``kept`` count. Places behind those take what came behind them.
    """
    start, before, evicted, counts, *_, chosen = numbers[..., None].unbind()
    place = torch.arange(length, device=kept.device)
    src = start + place + evicted
    if kept.shape[-1]:
        rank = (place - before).clamp(0, kept.shape[-1] - 1)
        src = torch.where(place < before + chosen, kept.gather(-1, rank), src)
    src = torch.where(place < before, start + place, src)
    return torch.where(place < counts, src, 0)


def dropped_entries(kept: Tensor, numbers: Tensor, length: int) -> Tensor:
    """The entries of each lane that are not among ``kept``, ascending: int64 [E, L, H, length].

    kept: int64 [E, L, H, C]. ``numbers`` int64 [3, E, L, H] are, of each lane: its first entry that
    may go, how many there are from it on, and how many of ``kept``, all of them from there, count.
    Behind the last dropped one there is the first entry.
    """
    first, held, counts = numbers[..., None].unbind()
    # A column more for what does not exist; as many as there can be.
    most = kept.shape[-1] + length
    place = torch.arange(most + 1, device=kept.device)
    dropped = (place < held).to(torch.uint8)
    dropped.scatter_(-1, torch.where(place[: kept.shape[-1]] < counts, kept - first, most), 0)
    found = dropped[..., :most].argsort(dim=-1, descending=True, stable=True)[..., :length]
    return first + torch.where(place[:length] < held - counts, found, 0)


def add_remainders(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """Merge ``more [E, L, Hkv, ...]`` into ``whole [L, num_rows, Hkv, ...]`` at ``rows [E]``.
    ``IndexError`` of the kernel, with nothing written, for a row that is not there."""
    if not _ADD_REMAINDERS.takes(whole.keys, torch.float32, multiple=8):
        add_remainders_torch(whole, rows, more)
        return
    if not all(x.is_contiguous() for x in whole):
        raise ValueError(f"add_remainders: remainders {list(whole.keys.shape)} have to be dense")
    rows, dense = as_int64(rows), [x.float().contiguous() for x in more]
    _ADD_REMAINDERS(
        *(*whole, rows, *dense),
        *(len(rows), *whole.keys.shape),
        refused=f"row {{}} is not one of {whole.keys.shape[1]}",
    )


def add_remainders_torch(whole: Remainder, rows: Tensor, more: Remainder) -> None:
    """The reference of ``add_remainders``."""
    by_layer = Remainder(*(part.transpose(0, 1) for part in more))
    for part, new in zip(whole, merged(whole.at(slice(None), rows), by_layer), strict=True):
        part[:, rows] = new.to(part.dtype)
