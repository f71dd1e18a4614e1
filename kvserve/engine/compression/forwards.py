"""A forward that events run over tokens that are stored already. It gives layers something that
stands in for the cache."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, ForwardBatch, LayerCache
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.store.entries import Entries
from kvserve.kernels.store.store_kv import reduce_queries
from kvserve.scheduler.arrays import IntArray


class StandIn:
    """Reads the cache as usual. Keys come rotated, for who looks at them."""

    rotate_and_store = None

    def __init__(self, cache: LayerCache, *, logs_shares: bool) -> None:
        self._cache, self.logs_shares = cache, logs_shares

    def turn(self, x: Tensor) -> Tensor:
        return self._cache.turn(x)

    def keys_values(self, layer: int) -> tuple[Entries, Entries, int]:
        return self._cache.keys_values(layer)

    def newest_keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        return self._cache.newest_keys_values(layer)


class QueryRecomputer:
    """Recomputes queries of tokens whose keys and values are in the cache: one forward that writes
    nothing. Each token attends to what its sequence holds up to the token's own entry, so tokens do
    not depend on each other and any subset of them may be computed."""

    def __init__(
        self, model: Transformer, cache: KVCache, batch: InputBatch, attention: AttentionBackend
    ) -> None:
        self._model = model
        self._cache = cache
        self._batch = batch
        self._attention = attention

    @property
    def heads(self) -> int:
        """Hq: query heads of this rank."""
        return self._model.part.num_heads

    def queries(
        self,
        rows: IntArray,
        token_ids: IntArray,
        positions: IntArray,
        entries: IntArray,
        heads: int,
    ) -> Tensor:
        """Rotated queries, reduced to ``heads``, before any of the rows is compacted.

        rows: [P]; token_ids, positions (logical), entries (physical): [P, Q]. Returns
        [P, L, heads, Q, D].
        """
        recorder = _QueryRecorder(self._cache, heads)
        input_ids = to_device(token_ids, self._batch.device).view(-1)
        batch = recompute(self._batch, rows, positions, entries)
        nobody = input_ids[:0]
        self._model(input_ids, batch, recorder, self._attention.plan(batch), nobody)
        by_layer = torch.stack(recorder.queries).unflatten(1, positions.shape)
        return by_layer.permute(1, 0, 3, 2, 4)


def recompute(
    batch: InputBatch, rows: IntArray, positions: IntArray, entries: IntArray
) -> ForwardBatch:
    """A forward over tokens that are stored already; each sees its row up to its own entry.

    rows: [P]; positions (logical), entries (physical): [P, Q].
    """
    last, count = to_device(entries, batch.device).view(-1), positions.shape[1]
    lengths = batch.prompt_lens[to_device(rows, batch.device)]
    return ForwardBatch(
        positions=to_device(positions, batch.device).view(-1),
        prompt_lens=lengths.repeat_interleave(count),
        slots=last.new_empty(0),
        query_slots=None,
        last=last.expand(batch.layout.layer_groups, batch.layout.rows, -1),
        tables=batch.block_tables,
        rows=rows,
        starts=np.arange(len(rows) + 1) * count,
        columns=entries.max(axis=1) // batch.layout.block_size + 1,
        causal=bool((np.diff(entries) == 1).all()),
        remainders=batch.remainders,
    )


class _QueryRecorder(StandIn):
    def __init__(self, cache: KVCache, heads: int) -> None:
        super().__init__(cache, logs_shares=False)
        self.queries: list[Tensor] = []
        self._heads = heads

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        pass

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        self.queries.append(reduce_queries(q, self._heads))
