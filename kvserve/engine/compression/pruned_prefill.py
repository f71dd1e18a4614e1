"""A prompt whose layers compute fewer and fewer tokens (PyramidInfer)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch, LayerCache
from kvserve.engine.cache.input_batch import InputBatch
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.device_events import UnevenEvents
from kvserve.engine.compression.event_parts import EventParts
from kvserve.engine.compression.forwards import StandIn
from kvserve.engine.compression.moves import lanes_of
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.messages.event import Events


class PrunedEvents(UnevenEvents):
    """A prompt's own event is part of its forward; later ones are uneven.

    Computes a prompt in one forward whose layers compute fewer and fewer tokens (PyramidInfer);
    each layer stores the entries of the tokens it computes.

    This is the only place where a policy runs between layers: the layers above do not compute the
    tokens that it drops.
    """

    def __init__(self, parts: EventParts, compressor: Compressor) -> None:
        super().__init__(parts, compressor)
        self._parts = parts

    def compute(self, task: Events, policy: Policy, *, logs_queries: bool) -> Tensor:
        """Compute the prompt of ``task``'s only row; its last token's hidden state [1, hidden]."""
        last, held = self._forward(task, policy, logs_queries)
        self._compressor.tell(task, held, lanes_of(task.new_lens, self._batch.layout))
        return last

    def _forward(self, task: Events, policy: Policy, logs_queries: bool) -> tuple[Tensor, Tensor]:
        """The last hidden state, and which tokens each layer holds: int64 [1, L, Hkv, n], those of
        upper layers padded behind with 0."""
        assert task.token_ids is not None
        model, cache, attention = self._parts.model, self._parts.cache, self._parts.attention
        layout = cache.layout
        whole = _whole_prompt(self._batch, task, logs_queries)
        tokens = to_device(task.token_ids[0], self._batch.device)
        hidden, added = model.embed(tokens), None
        rope = model.rotary.at(whole.positions, whole.prompt_lens)
        recent = int(task.plan.num_queries[0])
        lengths = lanes_of(task.new_lens, layout)[0, :, 0].tolist()
        seen = _Seen(cache, self._parts.group)
        at = torch.arange(lengths[0], device=self._batch.device)
        held = at.new_zeros(1, layout.num_layers, layout.num_kv_heads, len(at))
        for index, layer in enumerate(model.decoder_layers):
            if lengths[index] < len(at):
                kept = policy.survivors(seen.observation(recent, model.scale), lengths[index])
                at, hidden = at[kept], hidden[kept]
                added = None if added is None else added[kept]
            held[0, index, :, : len(at)] = at
            batch, angles = _part(whole, at, layout.block_size), (rope[0][at], rope[1][at])
            planned = attention.plan(batch)
            hidden, added = layer(hidden, added, angles, batch, seen, planned, index)
        assert added is not None
        return model.finish(hidden[-1:], added[-1:]), held


def _whole_prompt(batch: InputBatch, task: Events, logs_queries: bool) -> ForwardBatch:
    """A forward over the prompt of ``task``'s only row; sets the row's lengths after it."""
    writes = any(group.writes for group in batch.groups)
    assert not writes, "layers that drop tokens write nothing of them"
    rows, count = to_device(task.rows, batch.device), int(task.old_lens.max())
    batch.num_computed[rows] = count
    batch.after_compaction(task)
    positions = torch.arange(count, device=batch.device)
    at, layout = rows.expand(count), batch.layout
    entries = positions.expand(layout.layer_groups, layout.rows, -1)
    return ForwardBatch(
        positions=positions,
        prompt_lens=batch.prompt_lens[at],
        slots=batch.where.slots(at, entries),
        query_slots=batch.where.query_slots(at, positions) if logs_queries else None,
        last=entries,
        tables=batch.block_tables,
        rows=task.rows,
        starts=np.array([0, count]),
        columns=-(-task.old_lens.max(axis=(0, 2)) // layout.block_size),
        recent=batch.where.recent(at, positions) if logs_queries else None,
        remainders=batch.remainders,
    )


class _Seen(StandIn):
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
