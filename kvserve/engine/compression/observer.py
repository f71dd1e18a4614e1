"""What the events of one cache observe: windows of keys with their queries, scored by a policy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import SCRATCH_BYTES, KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.forwards import QueryRecomputer
from kvserve.engine.compression.moves import lanes_of
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.entry_format import int4_bytes
from kvserve.kernels.move.events import slots_of_entries
from kvserve.kernels.score.causal_scores import PIECE_BYTES, Queries
from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.quantized_entries import LevelKeys
from kvserve.kernels.store.remainder import Remainder
from kvserve.late import Made
from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events

if TYPE_CHECKING:
    from kvserve.kernels.score.centre_scores import Centres

_SLOT_BYTES = 40  # five numbers of int64 on the way to an entry's slot
_SCORE_BYTES = 16  # an entry's score, and what it is pooled and ranked by
_REMEMBERED = 64  # policies
_RANKED_BYTES = 52  # the same for a whole prompt, with the slots that the entry moves between


def event_bytes(layout: KVLayout, max_len: int) -> int:
    """Most that an event takes at once: scratch for several windows, or for one of ``max_len``."""
    entries, layers = max_len * layout.num_kv_heads, layout.num_layers
    layer = entries * (2 * layout.head_dim + _SLOT_BYTES)
    if layers * layer <= SCRATCH_BYTES:
        return SCRATCH_BYTES
    scoring = layer + 4 * PIECE_BYTES + entries * layers * _SCORE_BYTES
    return max(scoring, entries * layers * _RANKED_BYTES, SCRATCH_BYTES)


@dataclass(frozen=True, slots=True)
class Windows:
    """E' windows of ``length`` places; ``places [Q]`` are those of the queries that score them.

    ``entries [E', A, H]`` are the physical entries at place 0, one for all lanes or one for each
    layer and KV head. Lanes that hold less than ``length`` are aligned to the right: entries before
    ``begin [E']`` do not exist. ``positions [E']`` are the logical positions of the first queries;
    ``token_ids [E', Q]`` are given if queries are recomputed.
    """

    length: int
    places: IntArray
    rows: IntArray
    entries: IntArray
    begin: IntArray
    positions: IntArray
    token_ids: IntArray | None

    @classmethod
    def of(cls, task: Events, places: range) -> Windows:
        """The windows of events whose lanes have equal lengths."""
        plan, at = task.plan, np.asarray(places, np.int64)
        event, first = np.arange(len(task.rows)), np.zeros_like(plan.window_len)
        if (plan.windows != 1).any():
            event = np.repeat(event, plan.windows)
            first = ragged_arange(plan.windows) * plan.window_len[event]  # of an event's windows
        token_ids = None
        if task.token_ids is not None:
            token_ids = task.token_ids[event[:, None], first[:, None] + at]
        starts, length = plan.region_start[event] + first, int(plan.window_len[0])
        positions = plan.query_start[event] + first
        entries = starts[:, None, None]
        return cls(length, at, task.rows[event], entries, starts, positions, token_ids)

    @classmethod
    def of_uneven(cls, task: Events, places: range, layout: KVLayout) -> Windows:
        """One window per event, from the start of its region to the end of each lane."""
        held, begin = lanes_of(task.old_lens, layout), task.plan.region_start
        length = int(uneven_lengths(task)[0])
        at, positions = np.asarray(places, np.int64), task.plan.query_start
        return cls(length, at, task.rows, held - length, begin, positions, None)

    def part(self, at: slice) -> Windows:
        """The windows ``at`` alone."""
        ids = None if self.token_ids is None else self.token_ids[at]
        by_window = self.rows[at], self.entries[at], self.begin[at], self.positions[at]
        return Windows(self.length, self.places, *by_window, ids)


@dataclass(frozen=True, slots=True)
class Scope:
    """What events of a policy score, decided once: ``count`` layers, the ``leaders`` (``None``:
    all); ``where [L]`` is for every layer the index of its leader among them.

    ``query_heads`` vectors are read of a token; every ``log_stride``-th token's are logged.
    ``vector_bytes`` are those of a key and of a query. What is left of dropped entries is fitted if
    every layer is scored (``fits``).
    """

    policy: Policy
    leaders: IntArray | None
    where: Tensor | None
    count: int
    query_heads: int
    vector_bytes: tuple[int, int]
    log_stride: int
    fits: bool
    reads_values: bool


class Observer:
    """Gathers keys and queries of windows, as many at a time as the scratch holds."""

    def __init__(
        self,
        cache: KVCache,
        scale: float,
        recomputer: QueryRecomputer,
        scratch_bytes: int = SCRATCH_BYTES,
        group: RankGroup = ALONE,
        remainders: Remainders | None = None,
        sinks: Tensor | None = None,
        centres: Made[Centres] | None = None,
    ) -> None:
        """``sinks``: float32 [L, Hq] of the model, if it has them; ``centres``: of its queries, if
        they were measured."""
        self.scratch_bytes = scratch_bytes
        self._cache = cache
        self._scale, self._sinks, self._centres = scale, sinks, centres
        self._recomputer = recomputer
        self._group = group
        self._remainders = remainders
        self._scopes: dict[Policy, Scope] = {}

    @property
    def centres(self) -> Centres | None:
        """Where the model's queries point; read for the first policy that asks."""
        return None if self._centres is None else self._centres()

    def scope(self, policy: Policy) -> Scope:
        """What events of ``policy`` read and score here."""
        known = self._scopes.get(policy)
        if known is None:
            layout, reduction = self._cache.layout, policy.demands.recomputed_reduction
            leaders = policy.leaders(layout.num_layers)
            scored = sorted(set(leaders))
            alone = leaders == scored
            places = [scored.index(leader) for leader in leaders]
            heads = self._cache.query_log.heads
            if reduction is not None:
                heads = self._recomputer.heads if reduction == "heads" else layout.num_kv_heads
            key = query = 4 * layout.head_dim
            if policy.demands.scores_levels:  # neither is widened
                key = self._cache.dtype.itemsize * layout.head_dim
                query = int4_bytes(layout.head_dim)
            fits = policy.demands.leaves == "fitted" and alone
            known = Scope(
                policy,
                None if alone else np.array(scored),
                None if alone else to_device(places, self._cache.kv.device),
                len(scored),
                heads,
                (key, query),
                policy.event_trigger.log_stride,
                fits=fits,
                reads_values=fits or policy.demands.uses_values,
            )
            if len(self._scopes) >= _REMEMBERED:
                self._scopes.clear()
            self._scopes[policy] = known
        return known

    def observe(
        self,
        windows: Windows,
        scope: Scope,
        block_tables: Tensor,
        log_tables: Tensor,
        earlier: Tensor | None = None,
    ) -> Iterator[tuple[slice, slice, Tensor, Observation]]:
        """As many windows at a time as the scratch holds, or one by a few layers at a time.

        Yields the slices of the windows and of the scored layers, their scores, and what was
        scored.
        """
        layout = self._cache.layout
        # Scratch for a layer of one window: slots, entries, scores, and logits where a policy or
        # torch's operators hold them.
        length, queries, kv_heads = windows.length, len(windows.places), layout.num_kv_heads
        matrices = 2 if self._cache.kv.device.type == "cpu" else 0
        key, query = scope.vector_bytes
        entries = kv_heads * (length + scope.policy.demands.later_entries)
        layer = entries * (1 + scope.reads_values) * (key + _SLOT_BYTES)
        layer += scope.query_heads * queries * (query + _SLOT_BYTES) + entries * _SCORE_BYTES
        each = scope.count * (layer + matrices * 4 * scope.query_heads * queries * length)
        step, count = max(1, self.scratch_bytes // each), scope.count
        if each > self.scratch_bytes and not scope.policy.demands.couples_layers:
            count = max(1, count * self.scratch_bytes // each // 2)  # ranking all needs the rest
        for start in range(0, len(windows.rows), step):
            some = slice(start, start + step)
            part = windows if step >= len(windows.rows) else windows.part(some)
            recomputed = None
            if scope.policy.demands.recomputed_reduction is not None:
                assert part.token_ids is not None, "the trigger logs queries"
                positions = part.positions[:, None] + part.places
                tokens = part.rows, part.token_ids, positions, part.entries[:, 0] + part.places
                recomputed = self._recomputer.queries(*tokens, scope.query_heads)
            for first in range(0, scope.count, count):
                at, own = slice(first, min(first + count, scope.count)), scope.leaders
                if count < scope.count:
                    own = np.arange(layout.num_layers)[at] if own is None else own[at]
                observed = self._observation(
                    part, scope, own, block_tables, log_tables, recomputed, earlier
                )
                yield some, at, scope.policy.score(observed), observed

    def _observation(
        self,
        part: Windows,
        scope: Scope,
        layers: IntArray | None,
        block_tables: Tensor,
        log_tables: Tensor,
        recomputed: Tensor | None,
        earlier: Tensor | None,
    ) -> Observation:
        """What is scored of ``layers`` (``None``: of all), all windows at once."""
        cache, count, layout = self._cache, len(part.rows), self._cache.layout
        policy, remainders = scope.policy, self._remainders
        device, at = block_tables.device, None
        numbers, begin = part.entries, part.begin[:, None, None]
        if layers is not None:
            at = to_device(layers, device)
            if numbers.shape[1] > 1:  # else entries are as in all layers
                numbers = numbers[:, layers]
        lanes = layout.num_layers if layers is None else len(layers)
        if len(block_tables) > 1:
            block_tables = at_layers(block_tables, at, 0)
        places = np.arange(part.length + policy.demands.later_entries)
        shape = lanes, layout.num_kv_heads
        held = numbers[..., None] + places
        slots = slots_of(block_tables, part.rows, held, shape, layout.block_size)
        read = cache.entries.scored if policy.demands.scores_levels else cache.entries.keys
        keys: Any = read(slots, layers)
        values = None
        if isinstance(keys, Tensor):
            keys = by_window(keys, count)
        else:
            keys = LevelKeys(*(by_window(x, count) for x in keys))
        if scope.reads_values:
            values = by_window(cache.entries.values(slots, layers), count)
        queries: Queries
        if recomputed is not None:  # [E', L, heads, Q, D]
            queries = at_layers(recomputed, at)
        elif len(part.places):  # from the log: [E', L', Hlog, Q, D]
            log, stride = cache.query_log, scope.log_stride
            places = (part.positions[:, None] // stride + part.places // stride)[:, None, None]
            logged = lanes, log.heads
            if len(log_tables) > 1:
                log_tables = at_layers(log_tables, at, 0)
            slots = slots_of(log_tables, part.rows, places, logged, log.block_tokens)
            found = log.read(slots, at)
            if isinstance(found, Tensor):
                queries = by_window(found, count)
            else:
                queries = Int4Queries(*(by_window(x, count) for x in found))
        else:
            queries = keys[..., :0, :]
        scores = None if earlier is None else earlier[to_device(part.rows, device)]
        if scores is not None and scores.shape[1] > lanes:
            scores = at_layers(scores, at)
        missing = None  # places that do not exist
        if (numbers < begin).any():
            missing = to_device(held[..., : part.length] < begin[..., None], device, torch.bool)

        def left() -> Remainder | None:
            if remainders is None or policy.demands.leaves == "off":
                return None
            return remainders.of(to_device(part.rows, device), at)

        sinks = self._sinks
        if sinks is not None:  # of each E, L', Hlog; a group's mean query has its heads' mean sink
            each = queries.shape[:-2]
            sinks = at_layers(sinks, at, 0).unflatten(1, (each[-1], -1)).mean(dim=2).expand(*each)
        gather = functools.partial(self._group.gather, dim=2)
        how = (
            self._scale,
            scores,
            missing,
            gather,
            policy.demands.later_entries,
            values,
            Made(left),
            sinks,
        )
        if not policy.demands.uses_centres:
            return Observation(queries, keys, *how)
        centres = self.centres
        if centres is not None and at is not None:
            centres = centres.of_layers(at)
        return Observation(queries, keys, *how, centres, to_device(part.positions, device))


def at_layers(x: Tensor, layers: Tensor | None, dim: int = 1) -> Tensor:
    """``x`` at the indices ``layers [L']`` of ``dim``; unchanged if ``layers`` is ``None``."""
    return x if layers is None else x.index_select(dim, layers)


def uneven_lengths(task: Events) -> IntArray:
    """Entries in the longest lane of each event's region: [E]."""
    longest: IntArray = task.old_lens.max(axis=(0, 2)) - task.plan.region_start
    return longest


def slots_of(
    tables: Tensor,
    rows: IntArray,
    entries: IntArray | Tensor,
    lanes: tuple[int, int],
    block_tokens: int,
) -> Tensor:
    """Slots of ``entries [E', A, H, S]`` of table rows ``rows [E']``: [L, heads, E' * S]."""
    at = entries if isinstance(entries, Tensor) else to_device(entries, tables.device)
    owners = to_device(rows, tables.device)
    return slots_of_entries(tables, owners, at, lanes, block_tokens)


def by_window(x: Tensor, windows: int) -> Tensor:
    """[L, heads, E' * S, ...] -> [E', L, heads, S, ...]."""
    if windows == 1:
        return x[None]
    return x.unflatten(2, (windows, -1)).transpose(1, 2).transpose(0, 1)
