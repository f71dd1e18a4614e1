"""A decoder of our own some of whose layers keep states: Qwen 3.5.

The gated delta rule and the convolution before it take the chunks of all rows in one call, and
write the rows' states (``engine/cache/state_rows.py``) in place. The other layers attend as all
others do; a gate then decides how much of each number counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.experts import Experts
from kvserve.engine.models.families import ExpertSpec
from kvserve.engine.models.feed_forward import Mlp, NewMatrix, empty
from kvserve.engine.models.linear import linear
from kvserve.engine.models.operators import Operators
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Layer, Transformer, attend, new_norm
from kvserve.kernels import gated_delta as reference
from kvserve.kernels.cpu import gated_delta as compiled
from kvserve.kernels.cpu.build import why_missing
from kvserve.kernels.gated_delta import RowChunks


@dataclass(frozen=True)
class DeltaKernels:
    """Functions of ``kvserve.kernels.gated_delta``."""

    causal_convolution: Callable[[Tensor, Tensor, Tensor, RowChunks], Tensor]
    gated_delta_rule: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, RowChunks], Tensor]
    gated_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor]


def select_kernels(dtype: torch.dtype, device: str) -> DeltaKernels:
    """The compiled ones, if they are for this type and device."""
    known = device == "cpu" and dtype in compiled.DTYPES and why_missing("gated_delta") is None
    chosen: Any = compiled if known else reference
    return DeltaKernels(
        *(chosen.causal_convolution, chosen.gated_delta_rule),
        *(chosen.gated_norm, chosen.sigmoid_gate),
    )


class Mixture(nn.Module):
    """Experts, and the gate of an MLP beside them that all tokens go to."""

    def __init__(
        self, hidden: int, experts: ExpertSpec, operators: Operators, matrix: NewMatrix
    ) -> None:
        super().__init__()
        self.experts = Experts(hidden, experts, operators, matrix)
        self.gate = empty(1, hidden)

    @classmethod
    def of(cls, spec: ModelSpec, operators: Operators, matrix: NewMatrix) -> Mixture | None:
        """``None`` if a layer has none."""
        experts = spec.delta.experts
        return None if experts is None else cls(spec.hidden_size, experts, operators, matrix)

    def forward(self, x: Tensor, answer: Tensor) -> Tensor:
        """x: [T, hidden], and what the MLP makes of it -> [T, hidden]."""
        return self.experts(x) + linear(x, self.gate).sigmoid() * answer


class GatedLayer(Layer):
    """Attention with a gate of each number: ``qkv`` is q, gates, k and v. Of what is rotated, pairs
    lie half a head apart, as everywhere; the others are rotated by nothing."""

    kernels: DeltaKernels
    mixture: Mixture | None

    def forward(
        self,
        hidden: Tensor,
        added: Tensor | None,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        index: int,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``Layer.forward``."""
        spec, norm, eps = self.spec, self.operators.norm, self.spec.rms_norm_eps
        hidden, x = self.operators.add_and_norm(hidden, added, self.input_norm, eps)
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        parts = linear(x, self.qkv).view(x.shape[0], -1, spec.head_dim)
        q, gate, k, v = parts.split([heads, heads, kv_heads, kv_heads], dim=1)
        assert self.q_norm is not None and self.k_norm is not None
        both = norm(q, self.q_norm, eps), norm(k, self.k_norm, eps)
        q = self.store(both, v, rope, batch, cache, index)
        attended = attend(index, q, batch, cache, attention, None).flatten(1)
        return _second_half(
            self, hidden, self.kernels.sigmoid_gate(attended, gate.flatten(1)), wanted
        )


class DeltaLayer(nn.Module):
    """The gated delta rule of H heads over Hk of keys: ``projected`` makes queries, keys and values
    ``[2 Hk Dk + H Dv]`` of a token, gates ``[H Dv]``, and the two numbers of each head's rule."""

    def __init__(
        self, spec: ModelSpec, operators: Operators, kernels: DeltaKernels, matrix: NewMatrix
    ) -> None:
        super().__init__()
        delta = spec.delta
        self.spec, self.operators, self.kernels = spec, operators, kernels
        self.input_norm, self.post_norm = new_norm(spec), new_norm(spec)
        self.projected = matrix("projected", sum(delta.sizes), spec.hidden_size)
        self.taps = empty(delta.taps, delta.channels)
        self.decay = empty(2, delta.heads, dtype=torch.float32)
        self.scale = empty(delta.value_dim)
        self.out = matrix("out", spec.hidden_size, delta.values)
        self.mlp = Mlp(spec.hidden_size, spec.intermediate_size, operators, matrix)
        self.mixture = Mixture.of(spec, operators, matrix)

    def forward(
        self,
        hidden: Tensor,
        added: Tensor | None,
        states: Any,
        chunks: RowChunks,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """As ``Layer.forward``; ``states`` are this layer's (``LayerStates``), of all rows."""
        kernels, eps = self.kernels, self.spec.rms_norm_eps
        hidden, x = self.operators.add_and_norm(hidden, added, self.input_norm, eps)
        qkv, gate, b, a = linear(x, self.projected).split(self.spec.delta.sizes, dim=1)
        qkv = kernels.causal_convolution(qkv, self.taps, states.tail, chunks)
        read = kernels.gated_delta_rule(qkv, b, a, self.decay, states.recurrent, chunks)
        return _second_half(self, hidden, kernels.gated_norm(read, self.scale, gate, eps), wanted)


def _second_half(
    layer: GatedLayer | DeltaLayer, hidden: Tensor, mixed: Tensor, wanted: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What follows a layer's attention or rule, of the tokens at ``wanted``."""
    if wanted is not None:
        hidden, mixed = hidden[wanted], mixed[wanted]
        if not len(hidden):
            return hidden, hidden
    eps = layer.spec.rms_norm_eps
    added = linear(mixed, layer.out)
    hidden, x = layer.operators.add_and_norm(hidden, added, layer.post_norm, eps)
    answer = layer.mlp(x)
    return hidden, answer if layer.mixture is None else layer.mixture(x, answer)


class DeltaTransformer(Transformer):
    """One rank's. Layers that attend count their own entries."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: str, *others: Any) -> None:
        self._kernels = select_kernels(dtype, device)
        super().__init__(spec, dtype, device, *others)
        self.states: WeakKeyDictionary[Any, Mapping[int, Any]] = WeakKeyDictionary()
        """Of each cache that the layers run over: ``LayerStates`` by layer."""

    def new_layer(self, index: int, matrix: NewMatrix) -> nn.Module:
        spec = self.part
        if index in {state.layer for state in spec.states}:
            return DeltaLayer(spec, self.operators, self._kernels, matrix)
        layer = GatedLayer(spec, index, self.operators, self.group, matrix)
        layer.kernels, layer.mixture = self._kernels, Mixture.of(spec, self.operators, matrix)
        return layer

    def forward(
        self,
        input_ids: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """As ``Transformer.forward``."""
        hidden, added, place = self.embed(input_ids), None, 0
        rope = self.rotary.at(batch.positions, batch.prompt_lens)
        chunks = RowChunks(to_device(batch.rows, "cpu"), to_device(batch.starts, "cpu"))
        states, last = self.states[cache], len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kept = wanted if index == last else None
            if isinstance(layer, DeltaLayer):
                hidden, added = layer(hidden, added, states[index], chunks, kept)
            else:
                hidden, added = layer(hidden, added, rope, batch, cache, attention, place, kept)
                place += 1
        return self.finish(hidden, added)
