"""Adds up a model's queries before RoPE while an engine runs, and holds none of them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.compression.query_statistics import QueryStatistics, identity_of
from kvserve.engine.models.rotary import Rotary
from kvserve.engine.models.transformer import Transformer


class QueryCensus:
    """Counts every query that goes through ``cache`` until ``close``; sums are float64."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        spec = self._spec = model.spec
        shape, device = (spec.num_layers, spec.num_heads), model.embedding.device
        self._sum = torch.zeros(*shape, spec.head_dim, dtype=torch.float64, device=device)
        half = spec.head_dim // 2
        self._magnitudes = torch.zeros(*shape, half, dtype=torch.float64, device=device)
        self._rotaries: list[Rotary | None] = [
            None
            if layer in spec.without_rope
            else (model.rotary_of_windows or model.rotary)
            if layer in spec.windowed
            else model.rotary
            for layer in range(spec.num_layers)
        ]
        self._cache, self.tokens = cache, 0
        cache.on_queries = self._add

    def close(self) -> None:
        self._cache.on_queries = None

    def found(self) -> QueryStatistics:
        """What has been added up; at least one token has."""
        mean, magnitude = ((x / self.tokens).float().cpu() for x in (self._sum, self._magnitudes))
        return QueryStatistics(mean, magnitude, self.tokens, identity_of(self._spec))

    def _add(self, layer: int, batch: ForwardBatch, q: Tensor) -> None:
        pairs = _turned_back(q.float(), self._rotaries[layer], batch.positions)
        self._sum[layer] += pairs.double().sum(dim=0).flatten(-2)
        self._magnitudes[layer] += pairs.norm(dim=-2).double().sum(dim=0)
        if layer == 0:
            self.tokens += len(q)


def _turned_back(q: Tensor, rotary: Rotary | None, positions: Tensor) -> Tensor:
    """Queries [T, Hq, D] before RoPE, as pairs: [T, Hq, 2, D/2]."""
    pairs = q.unflatten(-1, (2, -1))
    if rotary is None:
        return pairs
    assert rotary.inv_freq is not None, "of RoPE whose frequencies change there are no statistics"
    angles = positions[:, None].float() * rotary.inv_freq
    cos, sin = (x[:, None] / rotary.factor for x in (angles.cos(), angles.sin()))
    low, high = pairs.unbind(dim=-2)
    return torch.stack([low * cos + high * sin, high * cos - low * sin], dim=-2)
