"""Events that turn entries into codes: observed in one step, written in the next.

Kept entries are read when an event is observed, and held until it is carried out, so that it may
write to the very blocks that it released. The first event of a sequence also evicts, by its
policy's scores; later ones code the oldest raw blocks of the lanes that are coded already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvserve.engine.cache.code_rows import CodeRows, CodeStore, CodeTables
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.device_events import UnevenEvents
from kvserve.engine.compression.event_parts import EventParts
from kvserve.engine.compression.moves import groups_of, lanes_of
from kvserve.engine.compression.observer import by_window, slots_of
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.kernels.score.codebook import extend, scales
from kvserve.kernels.store.coded_entries import Slots
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events

_SCRATCH_BYTES = 256 * 1024 * 1024
_HALF_MAX = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class Codebook:
    """The lanes' vectors: ``vectors [E, L, H, M, D]``, of which ``counts [E, L, H]`` exist.

    ``of_key [E, L, H, M]`` is true for keys; ``position`` is the position of a key's vector.
    """

    vectors: Tensor
    counts: Tensor
    of_key: Tensor
    position: Tensor


@dataclass(frozen=True, slots=True)
class Found:
    """Results of events observed together: entries raw and as codes, ``[E, L, H, N, ...]``.

    ``new_vectors [E, L, H, V, D]`` follow the vectors that the lanes already had.
    """

    keys: Tensor
    values: Tensor
    slots: Slots
    new_vectors: Tensor

    def of(self, events: list[int]) -> Found:
        """The results of some of the events."""
        at = to_device(events, self.keys.device)
        slots = Slots(*(getattr(self.slots, f.name)[at] for f in fields(Slots)))
        return Found(self.keys[at], self.values[at], slots, self.new_vectors[at])


class CodedEvents(UnevenEvents):
    """Events of policies with a codebook."""

    def __init__(self, parts: EventParts, compressor: Compressor) -> None:
        super().__init__(parts, compressor)
        self._rows = next(rows for rows in parts.batch.groups if isinstance(rows, CodeRows))
        self._coder = Coder(self._rows.cache, self._rows.store, compressor)

    def observe(self, events: Events, policy: Policy) -> tuple[Tensor, dict[int, Any]]:
        assert isinstance(policy, SpindleKV)
        tables = self._rows.code_tables(*self._tables)
        answer, found = self._coder.observe(events, policy, tables)
        return groups_of(answer, self._batch.layout), dict(found)

    def apply(self, events: Events, policy: Policy, found: Mapping[int, Any]) -> None:
        self._coder.run(events, found)


class Coder:
    """Carries out the events of policies with a codebook on one cache."""

    def __init__(self, cache: KVCache, store: CodeStore, compressor: Compressor) -> None:
        self._cache = cache
        self._store = store
        self._compressor = compressor

    def observe(
        self, task: Events, policy: SpindleKV, tables: CodeTables
    ) -> tuple[Tensor, dict[int, tuple[Found, int]]]:
        """For each lane, how many entries it keeps (or newly codes), and how many new vectors these
        need: ``[E, L, Hkv, 2]``.

        The second result says, by sequence, what its batch of events found, and where in that
        batch the sequence is.
        """
        lanes = self._cache.layout.num_layers, self._cache.layout.num_kv_heads
        device = self._cache.kv.device
        result = torch.zeros(len(task.rows), *lanes, 2, dtype=torch.int64, device=device)
        afresh, by_sequence = task.plan.window_len > 0, dict[int, tuple[Found, int]]()
        for kind in (True, False):
            at = np.flatnonzero(afresh == kind)
            if not len(at):
                continue
            part = task.part(at)
            entries, kept, coded = (self._kept if kind else self._tail)(part, policy, tables)
            found, vectors = self._encode(part, policy, entries, coded, tables)
            by_sequence |= {seq: (found, e) for e, seq in enumerate(part.seq_ids.tolist())}
            where = to_device(at, device)
            result[where] = torch.stack([kept, vectors], dim=-1)
        return result, by_sequence

    def run(self, task: Events, found: Mapping[int, tuple[Found, int]]) -> None:
        """Write codes and, for first events, the raw entries."""
        by_batch: dict[int, list[int]] = {}
        for e, seq in enumerate(task.seq_ids.tolist()):
            by_batch.setdefault(id(found[seq][0]), []).append(e)
        for events in by_batch.values():
            part = task.part(np.array(events))
            batch = found[int(part.seq_ids[0])][0]
            batch = batch.of([found[seq][1] for seq in part.seq_ids.tolist()])
            if part.plan.window_len[0]:  # until its first event a row's entry is its position
                counts = lanes_of(part.new_lens, self._cache.layout)
                self._compressor.tell(part, batch.slots.position, counts)
            self._write(part, batch)

    def _kept(
        self, task: Events, policy: SpindleKV, tables: CodeTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For first events: kept entries [E, L, H, N], how many, and how many can be coded."""
        lens, kept = self._compressor.observe(task, policy, tables.kv, tables.log)
        chosen = [kept[seq] for seq in task.seq_ids.tolist()]
        entries = _padded([selection.entries[i] for selection, i in chosen])
        size = self._cache.layout.block_size
        return entries, lens, lens // size * size

    def _tail(
        self, task: Events, policy: SpindleKV, tables: CodeTables
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For later events: the oldest raw entries of coded lanes, in whole blocks."""
        coded = self._by_lane(tables.coded, task.rows)
        held = to_device(lanes_of(task.old_lens, self._cache.layout), coded.device)
        size = self._cache.layout.block_size
        more = torch.where(coded > 0, (held - coded) // size * size, 0)
        place = torch.arange(policy.flush_every, device=coded.device)
        return coded[..., None] + place, more, more

    def _by_lane(self, by_row: Tensor, rows: IntArray) -> Tensor:
        """[LG, rows, R] -> [E, L, H] of ``rows [E]``."""
        at = to_device(rows, by_row.device)
        return by_row[:, at].transpose(0, 1)

    def _encode(
        self, task: Events, policy: SpindleKV, entries: Tensor, coded: Tensor, tables: CodeTables
    ) -> tuple[Found, Tensor]:
        """Code the first ``coded [E, L, H]`` of ``entries [E, L, H, N]``; count new vectors too."""
        keys, values = self._read(task.rows, entries, tables.kv)
        shape, number = entries.shape, torch.arange(entries.shape[-1], device=entries.device)
        there = number < coded[..., None]
        # Entries behind the compressed ones are the newest tokens, in order.
        held = lanes_of(task.old_lens, self._cache.layout)
        first = to_device(task.plan.first_uncompressed_pos[:, None, None] - held, entries.device)
        position = entries + first[..., None]
        book = self._codebook(task, tables)
        x = torch.stack([self._store.turn(keys, -position), values.float()])
        old = torch.stack([self._store.turn(book.vectors, -book.position), book.vectors.float()])
        exists = torch.arange(old.shape[-2], device=old.device) < book.counts[..., None]
        known = torch.stack([exists & book.of_key, exists & ~book.of_key])
        theta = to_device([policy.theta_k, policy.theta_v], x.device, torch.float32)
        counts = book.counts.expand(2, -1, -1, -1)
        streams = [y.flatten(0, 3) for y in (x, there.expand(2, *shape), old, known)]
        theta, counts = theta.repeat_interleave(coded.numel()), counts.flatten()
        tile = min(shape[-1], 2048)  # so many streams' similarities does the scratch hold at once
        each = max(1, _SCRATCH_BYTES // (16 * max(tile * (tile + old.shape[-2]), 1)))
        parts = []
        for start in range(0, len(theta), each):
            new, present, had, which = (y[start : start + each] for y in streams)
            some = slice(start, start + each)
            parts.append(extend(new, present, had, which, theta[some], counts[some]))
        ref, centres = (
            torch.cat([getattr(p, name) for p in parts]).view(2, *shape)
            for name in ("ref", "centres")
        )
        made = torch.cat([p.counts for p in parts]).view(2, *coded.shape)
        # Keys and values share one numbering: the new values' vectors come behind the new keys'.
        ref[1] += torch.where(ref[1] >= book.counts[..., None], made[0][..., None], 0)
        ref = torch.where(there, ref, 0)
        vectors, stood = _with_new(book, keys, values, position, centres, made)
        by_key, by_value = (_gather(vectors, number) for number in ref)
        slots = Slots(
            ref[0],
            ref[1],
            scales(keys, by_key).clamp(max=_HALF_MAX),
            scales(values, by_value).clamp(max=_HALF_MAX),
            position,
            position - stood.gather(3, ref[0]),
        )
        mine = book.counts[..., None] + torch.arange(2 * shape[-1], device=ref.device)
        mine = mine.clamp(max=vectors.shape[3] - 1)
        return Found(keys, values, slots, _gather(vectors, mine)), made.sum(dim=0)

    def _read(self, rows: IntArray, entries: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``entries [E, L, H, N]`` as they are cached: [E, L, H, N, D]."""
        layout = self._cache.layout
        lanes = layout.num_layers, layout.num_kv_heads
        slots = slots_of(tables, rows, entries, lanes, layout.block_size)
        read = self._cache.entries.keys(slots, None), self._cache.entries.values(slots, None)
        return by_window(read[0], len(rows)), by_window(read[1], len(rows))

    def _codebook(self, task: Events, tables: CodeTables) -> Codebook:
        """The lanes' codebooks so far. Slots tell which vectors are keys, and their positions."""
        store, layout = self._store, self._cache.layout
        lanes = layout.num_layers, layout.num_kv_heads
        both = tables.coded, tables.num_vectors
        coded, counts = (self._by_lane(table, task.rows) for table in both)

        def of_lanes(table: Tensor, per_block: int, flat: Tensor, most: Tensor) -> Tensor:
            number = torch.arange(int(most.max()), device=table.device).expand(*most.shape, -1)
            at = slots_of(table, task.rows, number, lanes, per_block)
            return flat[at.unflatten(2, (len(task.rows), -1)).permute(2, 0, 1, 3)]

        vectors = of_lanes(tables.vectors, store.vectors_per_block, store.vectors, counts)
        slots = Slots.unpacked(
            of_lanes(tables.code_slots, store.slots_per_block, store.slots, coded)
        )
        last = vectors.shape[3]
        entry = torch.arange(slots.ref_k.shape[-1], device=coded.device)
        ref = torch.where(entry < coded[..., None], slots.ref_k, last)
        of_key = torch.zeros(*counts.shape, last + 1, dtype=torch.bool, device=coded.device)
        position = torch.zeros_like(of_key, dtype=torch.int64)
        of_key.scatter_(-1, ref, True)
        position.scatter_(-1, ref, slots.position - slots.distance)
        return Codebook(vectors, counts, of_key[..., :last], position[..., :last])

    def _write(self, task: Events, found: Found) -> None:
        codes, store, size = task.codes, self._store, self._cache.layout.block_size
        assert codes is not None
        device = store.vectors.device

        def lanes(x: IntArray) -> Tensor:
            return to_device(x, device).transpose(0, 1)

        def put(flat: Tensor, x: Tensor, first: Tensor, end: Tensor, blocks: Tensor) -> None:
            number = first[..., None] + torch.arange(x.shape[3], device=device)
            per_block = len(flat) // len(self._cache.kv)
            _put(flat, x, number, number < end[..., None], blocks, per_block)

        before, after = lanes(codes.coded_before), lanes(codes.coded)
        put(store.slots, found.slots.packed(), before, after, lanes(codes.index_blocks))
        before, have = lanes(codes.vectors_before), lanes(codes.num_vectors)
        put(store.vectors, found.new_vectors, before, have, lanes(codes.vector_blocks))
        if not (task.plan.window_len > 0).all():
            return
        entry = torch.arange(found.keys.shape[3], device=device)
        raw = (entry >= after[..., None]) & (entry < lanes(task.new_lens)[..., None])
        place = (entry // size * 2 * size + entry % size).expand(raw.shape)
        for kind, x in enumerate((found.keys, found.values)):
            number = place + kind * size
            _put(store.vectors, x, number, raw, lanes(task.dst_blocks), 2 * size)


def _padded(places: list[Tensor]) -> Tensor:
    """[L, H, N] of every event -> [E, L, H, N], padded with zeros."""
    return pad_sequence([x.movedim(-1, 0) for x in places], batch_first=True).movedim(1, -1)


def _put(
    flat: Tensor, x: Tensor, number: Tensor, which: Tensor, blocks: Tensor, per_block: int
) -> None:
    """Write ``x [E, L, H, N, ...]`` where ``which`` is true, at index ``number`` of its lane.

    blocks: [E, L, H, M]. The others are written to the null block, as zeros: leaving them out would
    make the host wait for the device.
    """
    if blocks.shape[-1]:
        column = (number // per_block).clamp(max=blocks.shape[-1] - 1)
        to = blocks.gather(-1, column) * per_block + number % per_block
        flat[torch.where(which, to, 0)] = torch.where(which[..., None], x, 0)


def _with_new(
    book: Codebook, keys: Tensor, values: Tensor, position: Tensor, centres: Tensor, new: Tensor
) -> tuple[Tensor, Tensor]:
    """Vectors and their positions: each lane's old ones, then new keys', then new values'.

    The last place of both is a dummy.
    """
    length, room = keys.shape[3], 2 * keys.shape[3] + 1
    vectors, stood = pad(book.vectors, (0, 0, 0, room)), pad(book.position, (0, room))
    number, behind = torch.arange(length, device=keys.device), book.counts
    for entries, which, count in zip((keys, values), centres, new, strict=True):
        to = torch.where(number < count[..., None], behind[..., None] + number, -1)
        to = to % vectors.shape[3]
        vectors.scatter_(3, to[..., None].expand(entries.shape), _gather(entries, which))
        stood.scatter_(3, to, position.gather(3, which))
        behind = behind + count
    return vectors, stood


def _gather(x: Tensor, number: Tensor) -> Tensor:
    """x: [E, L, H, M, D]; number: [E, L, H, N] -> [E, L, H, N, D]."""
    return x.gather(3, number[..., None].expand(*number.shape, x.shape[-1]))
