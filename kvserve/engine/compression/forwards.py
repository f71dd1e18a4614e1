"""Forwards that events run: over tokens that are stored already, and over a prompt that is pruned.

Both give layers something that stands in for the cache.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import AttentionBackend, Entries, ForwardBatch, LayerCache
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.moves import lanes_of
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.kernels.store_kv import reduce_queries
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.event import Events


class _StandIn:
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
        batch = self._batch.build_recompute(rows, positions, entries)
        nobody = input_ids[:0]
        self._model(input_ids, batch, recorder, self._attention.plan(batch), nobody)
        by_layer = torch.stack(recorder.queries).unflatten(1, positions.shape)
        return by_layer.permute(1, 0, 3, 2, 4)


class _QueryRecorder(_StandIn):
    def __init__(self, cache: KVCache, heads: int) -> None:
        super().__init__(cache, logs_shares=False)
        self.queries: list[Tensor] = []
        self._heads = heads

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        pass

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        self.queries.append(reduce_queries(q, self._heads))


class PrunedPrefill:
    """Computes a prompt in one forward whose layers compute fewer and fewer tokens (PyramidInfer);
    each layer stores the entries of the tokens it computes.

    This is the only place where a policy runs between layers: the layers above do not compute the
    tokens that it drops.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        batch: InputBatch,
        attention: AttentionBackend,
        group: RankGroup,
    ) -> None:
        self._model = model
        self._group = group
        self._cache = cache
        self._batch = batch
        self._attention = attention

    def run(self, task: Events, policy: Policy, logs_queries: bool) -> tuple[Tensor, Tensor]:
        """Compute the prompt of ``task``'s only row.

        Returns the last token's hidden state [1, hidden], and which tokens each layer holds: int64
        [1, L, Hkv, n], those of upper layers padded behind with 0.
        """
        assert task.token_ids is not None
        model, layout = self._model, self._cache.layout
        whole = self._batch.build_full_prompt(task, logs_queries)
        tokens = to_device(task.token_ids[0], self._batch.device)
        hidden, added = model.embed(tokens), None
        rope = model.rotary.at(whole.positions, whole.prompt_lens)
        recent = int(task.plan.num_queries[0])
        lengths = lanes_of(task.new_lens, layout)[0, :, 0].tolist()
        seen = _Seen(self._cache, self._group)
        at = torch.arange(lengths[0], device=self._batch.device)
        held = at.new_zeros(1, layout.num_layers, layout.num_kv_heads, len(at))
        for index, layer in enumerate(model.decoder_layers):
            if lengths[index] < len(at):
                kept = policy.survivors(seen.observation(recent, model.scale), lengths[index])
                at, hidden = at[kept], hidden[kept]
                added = None if added is None else added[kept]
            held[0, index, :, : len(at)] = at
            batch, angles = _part(whole, at, layout.block_size), (rope[0][at], rope[1][at])
            attention = self._attention.plan(batch)
            hidden, added = layer(hidden, added, angles, batch, seen, attention, index)
        assert added is not None
        return model.finish(hidden[-1:], added[-1:]), held


class _Seen(_StandIn):
    """Remembers a layer's queries and keys, to score them after the layer."""

    def __init__(self, cache: LayerCache, group: RankGroup) -> None:
        super().__init__(cache, logs_shares=cache.logs_shares)
        self._group = group
        self._queries: Tensor
        self._keys: Tensor

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        self._keys = k
        self._cache.store(layer, batch, k, v)

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        self._queries = q
        self._cache.log(layer, batch, q, shares)

    def observation(self, recent: int, scale: float) -> Observation:
        """The layer as one event, with the queries of the ``recent`` tokens."""
        queries, keys = self._queries[-recent:].transpose(0, 1), self._keys.transpose(0, 1)
        gather = partial(self._group.gather, dim=2)
        return Observation(queries[None, None], keys[None, None], scale, gather=gather)


def _part(whole: ForwardBatch, at: Tensor, block_size: int) -> ForwardBatch:
    """The batch of the tokens ``at`` alone; their entries are stored one behind the other."""
    count = len(at)
    query_slots = None if whole.query_slots is None else whole.query_slots[..., at]
    recent = None if whole.recent is None else torch.ones_like(whole.recent[at])
    return replace(
        whole,
        positions=whole.positions[at],
        prompt_lens=whole.prompt_lens[at],
        slots=whole.slots[..., :count].contiguous(),
        query_slots=query_slots,
        recent=recent,
        last=whole.last[..., :count],
        starts=np.array([0, count]),
        columns=np.array([-(-count // block_size)]),
    )
