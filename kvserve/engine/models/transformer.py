"""One decoder for the Llama family; what differs between models is a flag of ``ModelSpec``.

The batch is an argument all the way down: there is no global context, and nothing in here knows
about compaction.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.models.feed_forward import Mlp, NewMatrix, empty
from kvserve.engine.models.linear import Holding, linear, packed, take_rows
from kvserve.engine.models.operators import Operators, select_operators
from kvserve.engine.models.rotary import Rotary
from kvserve.engine.models.spec import ModelSpec
from kvserve.kernels.store.remainder import capped
from kvserve.late import Late

if TYPE_CHECKING:
    from kvserve.engine.models.experts import Experts, SharedAndExperts

_experts = Late("engine.models.experts:Experts")
_shared_and_experts = Late("engine.models.experts:SharedAndExperts")
_PANEL = 64  # outputs of a panel, or a multiple of them, on any CPU


class LayerBase(nn.Module):
    """One rank's part (``spec``) of a layer, but for what mixes its tokens.

    ``input_norm`` and ``post_norm`` are before that and before the MLP; with ``norms`` ``after``,
    behind them. With ``both`` there are two more behind them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        operators: Operators,
        group: RankGroup,
        matrix: NewMatrix,
        mixed: int,
    ) -> None:
        """``mixed``: how many numbers of a token ``out`` reads."""
        super().__init__()
        self.spec, self.operators, self.group = spec, operators, group
        self.input_norm, self.post_norm = new_norm(spec), new_norm(spec)
        both = spec.norms == "both"
        self.after_attention = new_norm(spec) if both else None
        self.after_mlp = new_norm(spec) if both else None
        self.out = matrix("out", spec.hidden_size, mixed)
        self.out_bias = empty(spec.hidden_size) if spec.out_bias else None
        hidden, width, experts = spec.hidden_size, spec.intermediate_size, spec.experts_of(index)
        self.mlp: Mlp | Experts | SharedAndExperts
        if experts is None:
            self.mlp = Mlp(hidden, width, operators, matrix, spec.activation)
        elif experts.shared:
            self.mlp = _shared_and_experts(hidden, width, experts, operators, matrix)
        else:
            self.mlp = _experts(hidden, experts, operators, matrix)

    def second_half(
        self, hidden: Tensor, mixed: Tensor, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """hidden: [T, hidden]; mixed: [T, .], what ``out`` reads -> as of ``Layer.forward``."""
        spec, operators, eps = self.spec, self.operators, self.spec.rms_norm_eps
        if wanted is not None:
            hidden, mixed = hidden[wanted], mixed[wanted]
            if not len(hidden):
                return hidden, hidden
        added = self.group.sum(linear(mixed, self.out))
        if self.out_bias is not None:
            added = added + self.out_bias
        if spec.norms == "after":
            hidden = operators.add(hidden, operators.norm(added, self.input_norm, eps))
            return hidden, operators.norm(self.group.sum(self.mlp(hidden)), self.post_norm, eps)
        if self.after_attention is not None:
            added = operators.norm(added, self.after_attention, eps)
        added = operators.scaled(added, spec.residual_scale)
        hidden, x = operators.add_and_norm(hidden, added, self.post_norm, eps)
        answer = self.group.sum(self.mlp(x))
        if self.after_mlp is not None:
            answer = operators.norm(answer, self.after_mlp, eps)
        return hidden, operators.scaled(answer, spec.residual_scale)


class Layer(LayerBase):
    """A layer that attends: one rank's heads; q, k and v are one matrix."""

    def __init__(
        self, spec: ModelSpec, index: int, operators: Operators, group: RankGroup, matrix: NewMatrix
    ) -> None:
        super().__init__(spec, index, operators, group, matrix, spec.num_heads * spec.head_dim)
        self.rotates = index not in spec.without_rope
        gates = spec.num_heads * (spec.delta is not None)
        width = (spec.num_heads + gates + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = matrix("qkv", width, spec.hidden_size)
        self.qkv_bias = empty(width) if spec.qkv_bias else None
        normed = spec.num_heads, spec.num_kv_heads
        if spec.qk_norm != "width":
            normed = (1, 1) if spec.qk_norm else (0, 0)
        self.q_norm, self.k_norm = (
            new_norm(spec, heads * spec.head_dim) if heads else None for heads in normed
        )
        self.sinks = empty(spec.num_heads, dtype=torch.float32) if spec.sinks else None

    def project(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """x: [T, hidden] -> q and k, not rotated yet, as one tensor [T, Hq + Hkv, D] or, with norms
        of their own, as two; and v [T, Hkv, D]."""
        spec = self.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = linear(x, self.qkv, self.qkv_bias).view(x.shape[0], -1, spec.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if self.q_norm is None or self.k_norm is None:
            return (qk,), v
        q, k = qk.split([heads, kv_heads], dim=1)
        if spec.qk_norm == "width":
            q, k = q.flatten(1), k.flatten(1)
        norm, eps = self.operators.norm, spec.rms_norm_eps
        both = norm(q, self.q_norm, eps), norm(k, self.k_norm, eps)
        return tuple(x.view(x.shape[0], -1, spec.head_dim) for x in both), v

    def store(
        self,
        parts: tuple[Tensor, ...],
        v: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
        index: int,
    ) -> Tensor:
        """Rotate what ``project`` gives, and store k and v; returns q [T, Hq, D]."""
        spec = self.spec
        if self.rotates and cache.rotate_and_store is not None:
            qk = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
            q = cache.rotate_and_store(index, batch, qk, v, *rope)
        else:
            if self.rotates:
                parts = tuple(self.operators.rotate(part, *rope) for part in parts)
            if len(parts) == 1:
                parts = parts[0].split([spec.num_heads, spec.num_kv_heads], dim=1)
            q, k = parts
            cache.store(index, batch, k, v)
        return self.operators.scaled(q, spec.query_scale)

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
        """hidden: [T, hidden]; ``added`` is still to be added to it, if anything is.

        Returns both for the next layer, so that an addition and the norm behind it are one
        operation: [T, hidden], or [W, hidden] of the tokens at ``wanted`` [W].
        """
        spec, operators, eps = self.spec, self.operators, self.spec.rms_norm_eps
        if spec.norms == "after":
            hidden = x = hidden if added is None else operators.add(hidden, added)
        else:
            hidden, x = operators.add_and_norm(hidden, added, self.input_norm, eps)
        mixed = self.mix(x, rope, batch, cache, attention, index)
        return self.second_half(hidden, mixed, wanted)

    def mix(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        index: int,
    ) -> Tensor:
        """Attention: x [T, hidden] -> [T, Hq D]."""
        q = self.store(*self.project(x), rope, batch, cache, index)
        return attend(index, q, batch, cache, attention, self.sinks).flatten(1)


class Transformer(nn.Module):
    """Token ids in, hidden states out; ``logits`` is separate, since few positions need it.

    ``spec`` is the whole model, ``part`` what this rank has of each layer. The vocabulary is also
    divided into equal parts of ``rows``, whole panels if each rank gets one, so that none is filled
    up by a copy; the last rank's rows behind the last token are unused.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: str,
        group: RankGroup = ALONE,
        holding: Holding | None = None,
    ) -> None:
        """``holding``: which matrices are held as levels."""
        super().__init__()
        self.spec, self.holding = spec, holding or Holding()
        self.entry_table: Any = None
        """How entries in few bits are written, once an engine has looked at the model."""
        self.part = spec.part(group.size)
        self.group = group
        self.operators = select_operators(dtype, device)
        rows = -(-spec.vocab_size // group.size)
        panels = -(-rows // _PANEL) * _PANEL
        self.rows = rows = panels if panels * (group.size - 1) < spec.vocab_size else rows
        new = self.holding.matrix
        self.embedding = new("embedding", rows, spec.hidden_size)
        count = spec.num_layers + len(spec.states)
        layers = (self.new_layer(index, partial(new, layer=index)) for index in range(count))
        self.layers = nn.ModuleList(layers)
        self.norm = new_norm(spec)
        tied = spec.tied_embeddings
        self.head = self.embedding if tied else new("head", rows, spec.hidden_size)
        self.rotary = Rotary(spec.rope, spec.head_dim, dtype, device)
        local = spec.rope_of_windows
        self.rotary_of_windows = (
            None if local is None else Rotary(local, spec.head_dim, dtype, device)
        )
        scale = torch.tensor(spec.embedding_scale, dtype=dtype, device="cpu")
        self.embedding_scale = float(scale)  # transformers rounds it, too
        self.scale = spec.head_dim**-0.5

    def new_layer(self, index: int, matrix: NewMatrix) -> nn.Module:
        return Layer(self.part, index, self.operators, self.group, matrix)

    @property
    def decoder_layers(self) -> list[Layer]:
        """The layers that attend, with their type."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    @property
    def sinks_of_full_layers(self) -> Tensor | None:
        """float32 [layers that see all tokens, Hq]; ``None``: the model has no sinks."""
        if not self.spec.sinks:
            return None
        layers = [self.decoder_layers[layer].sinks for layer in self.spec.layers.full]
        return torch.stack([sinks for sinks in layers if sinks is not None])

    def pack(self, product: str) -> None:
        """Lay all matrices out for ``product``. Rows are looked up in a tied head as it lies then,
        or, of oneDNN's, which cannot be looked into, in a table of its own."""
        for part in list(self.layers.modules()):
            for name in ("qkv", "projected", "rule", "out", "router", "gate_up", "down"):
                if getattr(part, name, None) is not None:
                    setattr(part, name, packed(getattr(part, name), product))
        if self.spec.norms_from_one:
            for name, parameter in self.named_parameters():
                if name.endswith(("norm", "after_attention", "after_mlp")):
                    parameter.data += 1.0
        tied, head = self.head is self.embedding, packed(self.head, product)
        if tied and not (isinstance(head, Tensor) and head.is_mkldnn):
            self.embedding = head
        elif not isinstance(self.embedding, Tensor):
            self.embedding = packed(self.embedding, product)
        self.head = head

    def forward(
        self,
        input_ids: Tensor,
        batch: ForwardBatch,
        cache: LayerCache,
        attention: BatchAttention,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """input_ids: [T] -> hidden states behind the last norm, [T, hidden].

        ``attention`` is the backend's plan for ``batch``. If ``wanted`` [W] is given, the result is
        only the hidden states of the tokens at these places, in this order: of the others, the last
        layer needs just the keys and values.
        """
        hidden = self.embed(input_ids)
        rope = of_windows = self.rotary.at(batch.positions, batch.prompt_lens)
        if self.rotary_of_windows is not None:
            of_windows = self.rotary_of_windows.at(batch.positions, batch.prompt_lens)
        added: Tensor | None = None
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kept, angles = wanted if index == last else None, rope
            if index in self.spec.windowed:
                angles = of_windows
            hidden, added = layer(hidden, added, angles, batch, cache, attention, index, kept)
        return self.finish(hidden, added)

    def finish(self, hidden: Tensor, added: Tensor | None) -> Tensor:
        """What the last layer has returned, added and behind the last norm."""
        return self.operators.add_and_norm(hidden, added, self.norm, self.spec.rms_norm_eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [S, hidden], as of ``forward`` -> float32 [S, vocab]."""
        logits = self.group.gather(linear(hidden, self.head), dim=1)
        logits = logits[:, : self.spec.vocab_size].float()
        if self.spec.logits_divisor != 1.0:
            logits = logits * (1 / self.spec.logits_divisor)
        return capped(logits, self.spec.logits_cap) if self.spec.logits_cap else logits

    def tabulate(self, max_len: int) -> None:
        """Make the cosines and sines of all positions, so that steps look them up."""
        for rotary in (self.rotary, self.rotary_of_windows):
            if rotary is not None:
                rotary.tabulate(max_len, self.operators.take_rows)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden]: each token from the rank that has it, zeros from the others."""
        if self.group.size == 1:
            found = take_rows(self.embedding, input_ids, self.operators.take_rows)
            return self.operators.scaled(found, self.embedding_scale)
        rows = self.rows
        place = input_ids - self.group.rank * rows
        nearest = place.clamp(0, rows - 1)
        found = take_rows(self.embedding, nearest, self.operators.take_rows)
        elsewhere = (place < 0) | (place >= rows)
        whole = self.group.sum(found.masked_fill(elsewhere[:, None], 0))
        return self.operators.scaled(whole, self.embedding_scale)


def new_norm(spec: ModelSpec, size: int | None = None) -> nn.Parameter:
    """Weights of a norm over ``size`` numbers (default: a hidden state's)."""
    held = torch.float32 if spec.norms_from_one else None
    return empty(size or spec.hidden_size, dtype=held)


def attend(
    index: int,
    q: Tensor,
    batch: ForwardBatch,
    cache: LayerCache,
    attention: BatchAttention,
    sinks: Tensor | None,
) -> Tensor:
    """q: [T, Hq, D] of a layer whose keys and values are stored -> [T, Hq, D]; logs the queries
    that the batch wants."""
    shares = None
    if batch.query_slots is not None and cache.logs_shares:
        shares = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    attended = cache.turn(attention(index, cache.turn(q), cache, shares, sinks))
    cache.log(index, batch, q, shares)
    return attended
