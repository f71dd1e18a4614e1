"""What the events of one cache observe: windows of keys with their queries, scored by a policy."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.remainders import Remainders
from kvserve.engine.compression.recompute import QueryRecomputer
from kvserve.engine.compression.windows import Windows, by_window, queries_by_window, slots_of
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.kernels.remainder import Remainder
from kvserve.kernels.scores.causal_scores import PIECE_BYTES, Queries
from kvserve.kernels.scores.centre_scores import Centres
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout

SCRATCH_BYTES = 256 * 1024 * 1024
_SLOT_BYTES = 40  # five numbers of int64 on the way to an entry's slot
_SCORE_BYTES = 16  # an entry's score, and what it is pooled and ranked by
_RANKED_BYTES = 52  # the same for a whole prompt, with the slots that the entry moves between


def event_bytes(layout: KVLayout, max_len: int) -> int:
    """Most that an event takes at once: scratch for several windows, or for one of ``max_len``."""
    entries, layers = max_len * layout.num_kv_heads, layout.num_layers
    layer = entries * (2 * layout.head_dim + _SLOT_BYTES)
    if layers * layer <= SCRATCH_BYTES:
        return SCRATCH_BYTES
    scoring = layer + 4 * PIECE_BYTES + entries * layers * _SCORE_BYTES
    return max(scoring, entries * layers * _RANKED_BYTES)


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
        centres: Centres | None = None,
    ) -> None:
        """``sinks``: float32 [L, Hq] of the model, if it has them; ``centres``: of its queries, if
        they were measured."""
        self.scratch_bytes = scratch_bytes
        self._cache = cache
        self._scale, self._sinks, self.centres = scale, sinks, centres
        self._recomputer = recomputer
        self._group = group
        self._remainders = remainders

    def observe(
        self,
        windows: Windows,
        policy: Policy,
        layers: IntArray | None,
        block_tables: Tensor,
        log_tables: Tensor,
        earlier: Tensor | None = None,
    ) -> Iterator[tuple[slice, slice, Tensor, Observation]]:
        """As many windows at a time as the scratch holds, or one by a few layers at a time.

        Yields the slices of the windows and of ``layers``, their scores, and what was scored.
        """
        tables, num_layers = (block_tables, log_tables), self._cache.layout.num_layers
        scored = np.arange(num_layers) if layers is None else layers
        each = len(scored) * self._layer_bytes(windows, policy)
        step = max(1, self.scratch_bytes // each)
        count = len(scored)
        if each > self.scratch_bytes and not policy.couples_layers:
            count = max(1, count * self.scratch_bytes // each)
        for start in range(0, len(windows.rows), step):
            some = slice(start, start + step)
            part = windows.part(some)
            recomputed = None
            if policy.recomputed_reduction is not None:
                assert part.token_ids is not None, "the trigger logs queries"
                entries, heads = part.entries[:, 0] + part.places, self._query_heads(policy)
                tokens = part.rows, part.token_ids, part.query_positions, entries
                recomputed = self._recomputer.queries(*tokens, heads)  # [E', L, heads, Q, D]
            for first in range(0, len(scored), count):
                at = slice(first, min(first + count, len(scored)))
                own = layers if count >= len(scored) else scored[at]
                held = part.of_layers(own)
                observed = self._observation(held, policy, own, tables, recomputed, earlier)
                yield some, at, policy.score(observed), observed

    def _observation(
        self,
        part: Windows,
        policy: Policy,
        layers: IntArray | None,
        tables: tuple[Tensor, Tensor],
        recomputed: Tensor | None,
        earlier: Tensor | None,
    ) -> Observation:
        """What a policy scores of ``layers`` (``None``: of all), all windows at once."""
        cache, count = self._cache, len(part.rows)
        block_tables, log_tables = tables
        at = None if layers is None else to_device(layers, block_tables.device)
        lanes = len(layers) if layers is not None else cache.layout.num_layers
        if len(block_tables) > 1:
            block_tables = led(block_tables, at, 0)
        shape = lanes, cache.layout.num_kv_heads
        held = part.held(policy.later_entries)
        slots = slots_of(block_tables, part.rows, held, shape, cache.layout.block_size)
        keys, values = by_window(cache.entries.keys(slots, at), count), None
        if self._reads_values(policy):
            values = by_window(cache.entries.values(slots, at), count)
        queries: Queries = keys[..., :0, :]
        if recomputed is not None:
            queries = led(recomputed, at)
        elif len(part.places):
            queries = self._logged(part, log_tables, at)
        scores = None if earlier is None else earlier[to_device(part.rows, keys.device)]
        if scores is not None and scores.shape[1] > lanes:
            scores = led(scores, at)
        missing = part.missing(keys.device)

        @functools.cache
        def left() -> Remainder | None:
            if policy.leaves == "off" or self._remainders is None:
                return None
            return self._remainders.of(to_device(part.rows, keys.device), at)

        sinks = self._sinks
        if sinks is not None:  # of each E, L', Hlog; a group's mean query has its heads' mean sink
            each = queries.shape[:-2]
            sinks = led(sinks, at, 0).unflatten(1, (each[-1], -1)).mean(dim=2).expand(*each)
        gather = functools.partial(self._group.gather, dim=2)
        how = self._scale, scores, missing, gather, policy.later_entries, values, left, sinks
        if not policy.uses_centres:
            return Observation(queries, keys, *how)
        centres = self.centres
        if centres is not None and at is not None:
            centres = centres.of_layers(at)
        return Observation(queries, keys, *how, centres, to_device(part.positions, keys.device))

    def _logged(self, windows: Windows, log_tables: Tensor, layers: Tensor | None) -> Queries:
        """Queries of the windows from the log: [E', L', Hlog, Q, D]."""
        log = self._cache.query_log
        positions = windows.query_positions[:, None, None]
        lanes = self._cache.layout.num_layers, log.heads
        slots = slots_of(log_tables, windows.rows, positions, lanes, log.block_tokens)
        found = log.read(led(slots, layers, 0), layers)
        return queries_by_window(found, len(windows.rows))

    def _query_heads(self, policy: Policy) -> int:
        """Query vectors per token of the window."""
        reduction = policy.recomputed_reduction
        if reduction is None:
            return self._cache.query_log.heads
        return self._recomputer.heads if reduction == "heads" else self._cache.layout.num_kv_heads

    def _layer_bytes(self, windows: Windows, policy: Policy) -> int:
        """Scratch for a layer of one window: slots, entries, scores, and logits where a policy or
        torch's operators hold them."""
        layout, length, queries = self._cache.layout, windows.length, len(windows.places)
        heads, kv_heads = self._query_heads(policy), layout.num_kv_heads
        vector = 4 * layout.head_dim + _SLOT_BYTES
        matrices = 2 if self._cache.kv.device.type == "cpu" else 0
        entries = kv_heads * length * (2 if self._reads_values(policy) else 1)
        logits = matrices * 4 * heads * queries * length
        return (entries + heads * queries) * vector + kv_heads * length * _SCORE_BYTES + logits

    def _reads_values(self, policy: Policy) -> bool:
        return policy.reads_values or self.fits(policy)

    def fits(self, policy: Policy) -> bool:
        """Whether what is left of dropped entries is fitted: every layer has to be scored."""
        leaders, _ = self.leaders(policy)
        return policy.leaves == "fitted" and leaders is None

    def leaders(self, policy: Policy) -> tuple[IntArray, Tensor] | tuple[None, None]:
        """The layers that are scored, and for every layer the index of its leader among them, on
        the device; ``None`` twice if all layers are scored.
        """
        leaders = policy.leaders(self._cache.layout.num_layers)
        scored = sorted(set(leaders))
        if leaders == scored:
            return None, None
        places = [scored.index(leader) for leader in leaders]
        return np.array(scored), to_device(places, self._cache.kv.device)


def led(x: Tensor, layers: Tensor | None, dim: int = 1) -> Tensor:
    """``x`` at the indices ``layers [L']`` of ``dim``; unchanged if ``layers`` is ``None``."""
    return x if layers is None else x.index_select(dim, layers)
