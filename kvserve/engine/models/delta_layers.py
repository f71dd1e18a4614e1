"""A decoder of our own some of whose layers keep states: Qwen 3.5 and Qwen3-Next.

The gated delta rule and the convolution before it take the chunks of all rows in one call, and
write the rows' states (``engine/cache/state_rows.py``) in place. The other layers attend as all
others do; a gate then decides how much of each number counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.feed_forward import NewMatrix, empty
from kvserve.engine.models.linear import linear
from kvserve.engine.models.operators import Operators
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Layer, LayerBase, Transformer, attend
from kvserve.folders import install
from kvserve.kernels.build import why_missing
from kvserve.kernels.layer.gated_delta import RowChunks
from kvserve.kernels.layer.gated_delta_cpu import DTYPES, MAX_DIM, MAX_TAPS
from kvserve.late import LateModule

_KERNELS = [LateModule(f"kernels.layer.gated_delta_{name}") for name in ("cpu", "triton")]


def refusal(spec: Any, dtype: str, device: str) -> str | None:
    """Why these layers do not run those of a ``DeltaSpec`` in ``dtype`` on the device."""
    if device == "cpu" and dtype not in {"auto", *(str(known)[6:] for known in DTYPES)}:
        return f"has layers whose kernels take float32 and bfloat16, not {dtype}"
    if device == "cpu" and (missing := why_missing("gated_delta")) is not None:
        return f"has layers whose kernels are not there: {missing}"
    if device != "cpu" and find_spec("triton") is None:
        return f"has layers whose kernels are not there: Triton is not ({install('cuda')})"
    if max(spec.key_dim, spec.value_dim) > MAX_DIM or not 1 < spec.taps <= MAX_TAPS:
        return f"has heads of more than {MAX_DIM} dimensions, or no taps up to {MAX_TAPS}"
    return None


def on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def kernels_for(x: Tensor) -> LateModule:
    """Functions of ``gated_delta.py`` for numbers where ``x`` is."""
    return _KERNELS[on_gpu(x)]


class GatedLayer(Layer):
    """Attention with a gate of each number: ``qkv`` is q, gates, k and v. Of what is rotated, pairs
    lie half a head apart, as everywhere; the others are rotated by nothing."""

    def mix(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        index: int,
    ) -> Tensor:
        spec, norm, eps = self.spec, self.operators.norm, self.spec.rms_norm_eps
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        parts = linear(x, self.qkv).view(x.shape[0], -1, spec.head_dim)
        q, gate, k, v = parts.split([heads, heads, kv_heads, kv_heads], dim=1)
        assert self.q_norm is not None and self.k_norm is not None
        both = norm(q, self.q_norm, eps), norm(k, self.k_norm, eps)
        q = self.store(both, v, rope, batch, cache, index)
        attended = attend(index, q, batch, cache, attention, None).flatten(1)
        opened: Tensor = kernels_for(x).sigmoid_gate(attended, gate.flatten(1))
        return opened


class Guessed(NamedTuple):
    """What a layer computed from as rows verified guesses, and the states of these rows before:
    ``qkv [T, .]``, ``b`` and ``a [T, H]``; ``tail`` and ``recurrent [n, ...]``."""

    qkv: Tensor
    b: Tensor
    a: Tensor
    tail: Tensor
    recurrent: Tensor


class DeltaLayer(LayerBase):
    """The gated delta rule of H heads over Hk of keys: ``projected`` makes queries, keys and values
    ``[2 Hk Dk + H Dv]`` of a token, gates ``[H Dv]``, and the two numbers of each head's rule, if
    these have no matrix of their own (``rule``)."""

    def __init__(
        self, spec: ModelSpec, index: int, operators: Operators, group: RankGroup, matrix: NewMatrix
    ) -> None:
        delta = spec.delta
        super().__init__(spec, index, operators, group, matrix, delta.values)
        of_rule = delta.sizes[2:] if delta.apart else []
        sizes = delta.sizes[:2] if delta.apart else delta.sizes
        self.projected = matrix("projected", sum(sizes), spec.hidden_size)
        self.rule = matrix("rule", sum(of_rule), spec.hidden_size) if of_rule else None
        self.taps = empty(delta.taps, delta.channels)
        self.decay = empty(2, delta.heads, dtype=torch.float32)
        self.scale = empty(delta.value_dim)
        self.guessed: Guessed | None = None

    def forward(
        self,
        hidden: Tensor,
        added: Tensor | None,
        states: Any,
        chunks: RowChunks,
        wanted: Tensor | None = None,
        guessing: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """As ``Layer.forward``; ``states`` are this layer's (``LayerStates``), of all rows. Of the
        first ``guessing`` rows ``take_back`` may be called next."""
        eps = self.spec.rms_norm_eps
        hidden, x = self.operators.add_and_norm(hidden, added, self.input_norm, eps)
        projected, sizes = linear(x, self.projected), self.spec.delta.sizes
        if self.rule is None:
            qkv, gate, b, a = projected.split(sizes, dim=1)
        else:
            qkv, gate = projected.split(sizes[:2], dim=1)
            b, a = linear(x, self.rule).split(sizes[2:], dim=1)
        if guessing:
            before = states.tail[:guessing].clone(), states.recurrent[:guessing].clone()
            self.guessed = Guessed(qkv, b, a, *before)
        read = self._read(qkv, b, a, states, chunks)
        mixed = kernels_for(x).gated_norm(read, self.scale, gate, eps)
        return self.second_half(hidden, mixed, wanted)

    def take_back(self, states: Any, wrong: Tensor, chunks: RowChunks) -> None:
        """Let the states of those of the first rows that are ``wrong [n]`` be those behind
        ``chunks``, their part of the last forward's tokens, read from what was before."""
        assert self.guessed is not None
        qkv, b, a, *before = self.guessed
        for held, was in zip(states, before, strict=True):
            now = held[: len(wrong)]
            if on_gpu(now):  # a wait would cost more than a copy of all rows
                torch.where(wrong.view(-1, *[1] * (now.dim() - 1)), was, now, out=now)
            else:
                now[wrong] = was[wrong]
        self._read(qkv, b, a, states, chunks)

    def _read(self, qkv: Tensor, b: Tensor, a: Tensor, states: Any, chunks: RowChunks) -> Tensor:
        """[T, H, Dv]; the chunks' states are those behind them from here on."""
        kernels = kernels_for(qkv)
        qkv = kernels.causal_convolution(qkv, self.taps, states.tail, chunks)
        read: Tensor = kernels.gated_delta_rule(qkv, b, a, self.decay, states.recurrent, chunks)
        return read


def chunks_of(batch: ForwardBatch) -> RowChunks:
    """Those of a forward. On a GPU the rows of padding, which sees nothing, are below zero."""
    if not on_gpu(batch.last):
        return RowChunks(to_device(batch.rows, "cpu"), to_device(batch.starts, "cpu"))
    device, count = batch.last.device, len(batch.rows)
    longest = int(np.diff(batch.starts).max())
    if longest == 1 and np.array_equal(batch.rows, np.arange(count)):  # nothing from the host:
        starts = torch.arange(count + 1, device=device)  # a graph would copy it again and again
        rows = starts[:-1]
    else:
        rows, starts = to_device(batch.rows, device), to_device(batch.starts, device)
    own = batch.newest or batch  # a token that sees itself there may see none of the others
    seen = own.last[0, 0, starts[:-1]]
    return RowChunks(torch.where(seen < 0, -1, rows), starts, longest)


class DeltaTransformer(Transformer):
    """One rank's. Layers that attend count their own entries."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.states: WeakKeyDictionary[Any, Mapping[int, Any]] = WeakKeyDictionary()
        """Of each cache that the layers run over: ``LayerStates`` by layer."""
        self.guessing = 0
        """How many of the first rows verify guesses in the next forward."""

    def new_layer(self, index: int, matrix: NewMatrix) -> nn.Module:
        has_state = index in {state.layer for state in self.part.states}
        kind = DeltaLayer if has_state else GatedLayer
        return kind(self.part, index, self.operators, self.group, matrix)

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
        chunks = chunks_of(batch)
        states, last = self.states[cache], len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kept = wanted if index == last else None
            if isinstance(layer, DeltaLayer):
                hidden, added = layer(hidden, added, states[index], chunks, kept, self.guessing)
            else:
                hidden, added = layer(hidden, added, rope, batch, cache, attention, place, kept)
                place += 1
        return self.finish(hidden, added)

    def take_back(
        self, cache: LayerCache, starts: Tensor, lengths: Tensor, true: Tensor, longest: int
    ) -> None:
        """The guesses of a forward that were wrong: of the first rows' chunks, which begin at
        ``starts [n]`` and have ``lengths [n]`` tokens, up to ``longest``, the first ``true [n]``
        count. Nothing is read back from a GPU."""
        wrong, none = true < lengths, torch.full_like(true, -1)
        rows = torch.where(wrong, torch.arange(len(true), device=true.device), none)
        # The rest of a chunk is of no row.
        parts = torch.stack([starts, starts + true], dim=1).flatten()
        parts = torch.cat([parts, (starts + lengths)[-1:]])
        chunks = RowChunks(torch.stack([rows, none], dim=1).flatten(), parts, longest)
        right = true.is_cpu and not wrong.any()
        for index, layer in enumerate(self.layers):
            if isinstance(layer, DeltaLayer):
                if not right:
                    layer.take_back(self.states[cache][index], wrong, chunks)
                layer.guessed = None
        self.guessing = 0
