"""Where each tensor of a checkpoint goes: its name, and its place in the decoder's matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.feed_forward import Experts, Mlp
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.storage import LevelPiece, Region
from kvserve.engine.models.transformer import Layer, Transformer
from kvserve.kernels.weight_levels import Levels

_LLAMA = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "out": "self_attn.o_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
_INTERNLM2 = {
    "embedding": "model.tok_embeddings",
    "head": "output",
    "out": "attention.wo",
    "input_norm": "attention_norm",
    "post_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_OLMO2 = {
    **_LLAMA,
    "input_norm": "post_attention_layernorm",
    "post_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_LLAMA, "gate_up": "mlp.gate_up_proj"}
_GEMMA = {
    **_LLAMA,
    "after_attention": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
_NAMES = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "InternLM2ForCausalLM": _INTERNLM2,
    "Olmo2ForCausalLM": _OLMO2,
    "Phi3ForCausalLM": _PHI3,
}
_EXPERTS = {"router": "mlp.gate", "experts": "mlp.experts", "gate": "gate_proj", "up": "up_proj"}
_EXPERTS["down"] = "down_proj"
TRANSPOSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
"""How names end that gpt-oss gives to all experts at once."""
BY_INPUTS = ("out", "down")
"""How matrices end of which ranks have parts of the inputs; of others, of the outputs."""
_MIXTRAL = {"router": "block_sparse_moe.gate", "experts": "block_sparse_moe.experts"}
_MIXTRAL |= {"gate": "w1", "up": "w3", "down": "w2"}
_SEPARATE_QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_FUSED_QKV = {
    "InternLM2ForCausalLM": ("attention.wqkv",),
    "Phi3ForCausalLM": ("self_attn.qkv_proj",),
}


@dataclass(frozen=True)
class Target:
    """A parameter or a part of one, and the ``region`` of a checkpoint's tensor that belongs there.

    ``shape`` is the whole tensor's. Row i of the region is row ``order[i]`` of the parameter.
    """

    tensor: Tensor | Levels
    shape: tuple[int, ...]
    region: Region
    order: Tensor | None = None

    @classmethod
    def whole(cls, tensor: Tensor | Levels) -> Target:
        """All of a tensor, on every rank."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, tuple(slice(0, size) for size in shape))

    @classmethod
    def shared(
        cls, tensor: Tensor | Levels, group: RankGroup, dim: int = 0, total: int | None = None
    ) -> Target:
        """This rank's equal part of ``total`` (default: all ranks' rows) along ``dim``.

        If ``total`` is less than the ranks' rows, the last ranks' last rows are unused.
        """
        size = tensor.shape[dim]
        total = total or size * group.size
        start, stop = (min(rank * size, total) for rank in (group.rank, group.rank + 1))
        whole = cls.whole(tensor.narrow(dim, 0, stop - start))
        shape, region = list(whole.shape), list(whole.region)
        shape[dim], region[dim] = total, slice(start, stop)
        return cls(whole.tensor, tuple(shape), tuple(region))

    def write(self, place: Region, values: Tensor) -> None:
        """Store one piece, ``values`` being ``[place]`` of the checkpoint's tensor."""
        assert isinstance(self.tensor, Tensor)
        rows, *others = (
            slice(part.start - region.start, part.stop - region.start)
            for part, region in zip(place, self.region, strict=False)
        )
        self.tensor[(self._rows(rows), *others)] = values.to(self.tensor.device)

    def write_levels(self, piece: LevelPiece, groups: Tensor) -> None:
        """Store one piece of levels; ``groups`` int64 [columns]: that of each input."""
        held, first = self.tensor, self.region[0].start
        assert isinstance(held, Levels)
        order = torch.arange(held.inputs) if held.order is None else held.order.cpu().long()
        order = order.clamp(0, len(groups) - 1)  # what is no input of x, is multiplied by 0
        own = groups[order[:: held.form.group]]
        offsets = None if piece.offsets is None else piece.offsets[:, own]
        rows = slice(piece.rows.start - first, piece.rows.stop - first)
        held.write(self._rows(rows), piece.levels[:, order], piece.scales[:, own], offsets)

    def _rows(self, rows: slice) -> slice | Tensor:
        return rows if self.order is None else self.order[rows]


def matrix_sources(spec: ModelSpec) -> dict[str, list[str]]:
    """The checkpoint's weights that each matrix of the decoder is made of, in the order of its
    rows; none for a matrix that is never quantised."""
    names = _NAMES.get(spec.architecture, _LLAMA)
    qkv = _FUSED_QKV.get(spec.architecture, _SEPARATE_QKV)
    halves = ("gate_up",) if "gate_up" in names else ("gate", "up")
    sources = {"embedding": [f"{names['embedding']}.weight"]}
    if not spec.tied_embeddings:
        sources["head"] = [f"{names['head']}.weight"]
    for index in range(spec.num_layers):
        prefix, experts = f"model.layers.{index}.", spec.experts_of(index)
        own = {"qkv": list(qkv), "out": [names["out"]]}
        if experts is None:
            own |= {"mlp.gate_up": [names[half] for half in halves], "mlp.down": [names["down"]]}
        elif not spec.sinks:  # gpt-oss has all experts in one tensor
            of = _MIXTRAL if spec.architecture == "MixtralForCausalLM" else _EXPERTS
            each = [f"{of['experts']}.{expert}." for expert in range(experts.count)]
            own["mlp.gate_up"] = [name + of[half] for name in each for half in ("gate", "up")]
            own["mlp.down"] = [name + of["down"] for name in each]
        for matrix, parts in own.items():
            sources[f"layers.{index}.{matrix}"] = [f"{prefix}{part}.weight" for part in parts]
    return sources


def weight_targets(model: Transformer) -> dict[str, Target]:
    """Every tensor that the checkpoint must have, by its name there."""
    spec, group, vocab = model.spec, model.group, model.spec.vocab_size
    names, qkv = _NAMES.get(spec.architecture, _LLAMA), _QKV.get(spec.architecture, _separate_qkv)
    targets = {
        f"{names['embedding']}.weight": Target.shared(model.embedding, group, total=vocab),
        "model.norm.weight": Target.whole(model.norm),
    }
    if not spec.tied_embeddings:
        targets[f"{names['head']}.weight"] = Target.shared(model.head, group, total=vocab)
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"model.layers.{index}."
        targets |= qkv(layer, prefix)
        parts = {
            "out": Target.shared(layer.out, group, dim=1),
            "input_norm": Target.whole(layer.input_norm),
            "post_norm": Target.whole(layer.post_norm),
        }
        if layer.after_attention is not None and layer.after_mlp is not None:
            parts["after_attention"] = Target.whole(layer.after_attention)
            parts["after_mlp"] = Target.whole(layer.after_mlp)
        if layer.sinks is not None:
            targets[f"{prefix}self_attn.sinks"] = Target.whole(layer.sinks)
        if layer.out_bias is not None:
            targets[f"{prefix}{names['out']}.bias"] = Target.whole(layer.out_bias)
        if isinstance(layer.mlp, Experts):
            targets |= _experts(layer.mlp, group, prefix, spec.architecture)
        else:
            parts |= _mlp(layer.mlp, group, names)
        targets |= {f"{prefix}{names[part]}.weight": target for part, target in parts.items()}
    return targets


def is_unused(name: str, model: Transformer) -> bool:
    """Whether the checkpoint may hold this tensor although the model does not use it."""
    quantization = model.spec.quantization
    if quantization is not None and quantization.is_unused(name):
        return True
    heads = (f"{_LLAMA['head']}.weight", f"{_INTERNLM2['head']}.weight")
    return name.endswith("rotary_emb.inv_freq") or (model.spec.tied_embeddings and name in heads)


def _mlp(mlp: Mlp, group: RankGroup, names: dict[str, str]) -> dict[str, Target]:
    down = {"down": Target.shared(mlp.down, group, dim=1)}
    if "gate_up" in names:
        return {"gate_up": Target.whole(mlp.gate_up), **down}
    gate, up = mlp.gate_up.chunk(2)
    return {"gate": Target.shared(gate, group), "up": Target.shared(up, group), **down}


def _experts(mlp: Experts, group: RankGroup, prefix: str, architecture: str) -> dict[str, Target]:
    if mlp.router_bias is not None:
        return _experts_with_biases(mlp, f"{prefix}mlp.")
    names = _MIXTRAL if architecture == "MixtralForCausalLM" else _EXPERTS
    targets = {f"{prefix}{names['router']}.weight": Target.whole(mlp.router)}
    for expert in range(mlp.spec.count):
        gate, up = mlp.gate_up[expert].chunk(2)
        own = f"{prefix}{names['experts']}.{expert}."
        targets[f"{own}{names['gate']}.weight"] = Target.shared(gate, group)
        targets[f"{own}{names['up']}.weight"] = Target.shared(up, group)
        targets[f"{own}{names['down']}.weight"] = Target.shared(mlp.down[expert], group, dim=1)
    return targets


def _experts_with_biases(mlp: Experts, prefix: str) -> dict[str, Target]:
    """gpt-oss: all experts in one tensor, on one rank."""
    assert mlp.router_bias is not None
    assert mlp.gate_up_bias is not None and mlp.down_bias is not None
    parts = {
        "router.weight": mlp.router,
        "router.bias": mlp.router_bias,
        "experts.gate_up_proj": mlp.gate_up,
        "experts.gate_up_proj_bias": mlp.gate_up_bias,
        "experts.down_proj": mlp.down,
        "experts.down_proj_bias": mlp.down_bias,
    }
    return {f"{prefix}{name}": Target.whole(tensor) for name, tensor in parts.items()}


def _separate_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    spec, attention = layer.spec, prefix + "self_attn."
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    targets = {}
    for kind, fused in {"weight": layer.qkv, "bias": layer.qkv_bias}.items():
        if fused is not None:
            for part, rows in zip("qkv", fused.split([q_size, kv_size, kv_size]), strict=True):
                targets[f"{attention}{part}_proj.{kind}"] = Target.shared(rows, layer.group)
    if layer.q_norm is not None and layer.k_norm is not None:
        targets[attention + "q_norm.weight"] = Target.whole(layer.q_norm)
        targets[attention + "k_norm.weight"] = Target.whole(layer.k_norm)
    return targets


def _fused_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    """Phi-3: as the decoder has it, on one rank."""
    return {f"{prefix}self_attn.qkv_proj.weight": Target.whole(layer.qkv)}


def _grouped_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    """InternLM2: for each KV head, its query heads, its key and its value, in one matrix."""
    spec = layer.spec
    rows = torch.arange(layer.qkv.shape[0], device=layer.qkv.device).view(-1, spec.head_dim)
    q, k, v = rows.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
    order = torch.cat([q.unflatten(0, (spec.num_kv_heads, -1)), k[:, None], v[:, None]], dim=1)
    whole = Target.shared(layer.qkv, layer.group)
    return {f"{prefix}attention.wqkv.weight": replace(whole, order=order.flatten())}


_QKV = {"InternLM2ForCausalLM": _grouped_qkv, "Phi3ForCausalLM": _fused_qkv}
