"""One decoder for the Llama family; what differs between models is a flag of ``ModelSpec``.

The batch is an argument all the way down: there is no global context, and nothing in here knows
about compaction.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.models.fp8 import FP8
from kvserve.engine.models.linear import linear, packed
from kvserve.engine.models.operators import Operators, select_operators
from kvserve.engine.models.rotary import Rotary
from kvserve.engine.models.spec import ModelSpec


class Layer(nn.Module):
    """One rank's heads and part of the MLP (``spec``); qkv and gate-up are one matrix each.

    Matrices that are held as FP8 have a scale per output.
    """

    def __init__(
        self, spec: ModelSpec, operators: Operators, group: RankGroup, *, fp8: bool
    ) -> None:
        super().__init__()
        self.spec, self.operators, self.group = spec, operators, group
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.input_norm = _empty(spec.hidden_size)
        self.qkv, self.qkv_scales = _matrix(width, spec.hidden_size, fp8)
        self.qkv_bias = _empty(width) if spec.qkv_bias else None
        self.q_norm = _empty(spec.head_dim) if spec.qk_norm else None
        self.k_norm = _empty(spec.head_dim) if spec.qk_norm else None
        heads = spec.num_heads * spec.head_dim
        self.out, self.out_scales = _matrix(spec.hidden_size, heads, fp8)
        self.post_norm = _empty(spec.hidden_size)
        width = 2 * spec.intermediate_size
        self.gate_up, self.gate_up_scales = _matrix(width, spec.hidden_size, fp8)
        self.down, self.down_scales = _matrix(spec.hidden_size, spec.intermediate_size, fp8)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [T, hidden] -> rotated q [T, Hq, D], rotated k [T, Hkv, D], v [T, Hkv, D]."""
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = linear(x, self.qkv, self.qkv_bias, self.qkv_scales).view(
            x.shape[0], -1, spec.head_dim
        )
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split([heads, kv_heads], dim=1)
            qk = torch.cat([self._norm(q, self.q_norm), self._norm(k, self.k_norm)], dim=1)
        q, k = self.operators.rotate(qk, cos, sin).split([heads, kv_heads], dim=1)
        return q, k, v

    def forward(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        index: int,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """hidden: [T, hidden] -> [T, hidden], or [W, hidden] of the tokens at ``wanted`` [W]."""
        q, k, v = self.project(self._norm(hidden, self.input_norm), *rope)
        cache.store(index, batch, k, v)
        shares = None
        if batch.query_slots is not None and cache.logs_shares:
            shares = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        attended = attention.forward(index, q, cache, shares).flatten(1)
        cache.log(index, batch, q, shares)
        if wanted is not None:
            hidden, attended = hidden[wanted], attended[wanted]
            if not len(hidden):
                return hidden
        attended = linear(attended, self.out, scales=self.out_scales)
        hidden = hidden + self.group.sum(attended)
        x = self._norm(hidden, self.post_norm)
        gate_up = linear(x, self.gate_up, scales=self.gate_up_scales)
        activated = self.operators.silu_and_mul(gate_up)
        return hidden + self.group.sum(linear(activated, self.down, scales=self.down_scales))

    def pack(self, product: str) -> None:
        """Lay the matrices out for ``product`` (``linear.py``)."""
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(self, name, packed(getattr(self, name), product))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.operators.rms_norm(x, weight, self.spec.rms_norm_eps)


class Transformer(nn.Module):
    """Token ids in, hidden states out; ``logits`` is separate, since few positions need it.

    ``spec`` is the whole model, ``part`` what this rank has of each layer. The vocabulary is also
    divided into equal parts; the last rank's rows behind the last token are unused.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: str,
        group: RankGroup = ALONE,
        *,
        fp8: bool = False,
    ) -> None:
        """``fp8``: the layers' matrices are held as FP8."""
        super().__init__()
        self.spec, self.fp8 = spec, fp8
        self.part = spec.part(group.size)
        self.group = group
        self.operators = select_operators(dtype, device)
        rows = -(-spec.vocab_size // group.size)
        self.embedding = _empty(rows, spec.hidden_size)
        self.layers = nn.ModuleList(
            Layer(self.part, self.operators, group, fp8=fp8) for _ in range(spec.num_layers)
        )
        self.norm = _empty(spec.hidden_size)
        self.head = self.embedding if spec.tied_embeddings else _empty(rows, spec.hidden_size)
        self.rotary = Rotary(spec, dtype, device)
        self.scale = spec.head_dim**-0.5

    @property
    def decoder_layers(self) -> list[Layer]:
        """The layers with their type."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def pack(self, product: str) -> None:
        """Lay all matrices out for ``product``. A tied head is copied: lookups need it plain."""
        for layer in self.decoder_layers:
            layer.pack(product)
        if self.head is self.embedding and product == "compiled":
            self.head = nn.Parameter(self.head.data.clone(), requires_grad=False)
        self.head = packed(self.head, product)

    def forward(
        self,
        input_ids: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """input_ids: [T] -> hidden states before the last norm, [T, hidden].

        ``attention`` is the backend's plan for ``batch``. If ``wanted`` [W] is given, the result is
        only the hidden states of the tokens at these places, in this order: of the others, the last
        layer needs just the keys and values.
        """
        hidden = self.embed(input_ids)
        rope = self.rotary.at(batch.positions, batch.prompt_lens)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kept = wanted if index == last else None
            hidden = layer(hidden, rope, batch, cache, attention, index, kept)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden] -> float32 [S, vocab]."""
        hidden = self.operators.rms_norm(hidden, self.norm, self.spec.rms_norm_eps)
        logits = self.group.gather(linear(hidden, self.head), dim=1)
        return logits[:, : self.spec.vocab_size].float()

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: each token from the rank that has it, zeros from the others."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.embedding)
        rows = len(self.embedding)
        place = input_ids - self.group.rank * rows
        found = F.embedding(place.clamp(0, rows - 1), self.embedding)
        elsewhere = (place < 0) | (place >= rows)
        return self.group.sum(found.masked_fill(elsewhere[:, None], 0))


def _empty(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


def _matrix(rows: int, columns: int, fp8: bool) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A weight [rows, columns] and, as FP8, its scales [rows, 1]."""
    if not fp8:
        return _empty(rows, columns), None
    return _empty(rows, columns, dtype=FP8), _empty(rows, 1, dtype=torch.float32)
