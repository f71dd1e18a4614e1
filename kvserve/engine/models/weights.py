"""Where each tensor of a checkpoint goes: its name, and its place in the decoder's matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.models.transformer import Layer, Transformer

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


@dataclass(frozen=True)
class Target:
    """A parameter or a part of one; row i of the checkpoint's tensor is its row ``order[i]``."""

    tensor: Tensor
    order: Tensor | None = None

    def write(self, place: tuple[slice, ...], values: Tensor) -> None:
        """Store one piece, ``values`` being ``[place]`` of the checkpoint's tensor."""
        rows = place[0] if self.order is None else self.order[place[0]]
        self.tensor[(rows, *place[1:])] = values.to(self.tensor.device)


def weight_targets(model: Transformer) -> dict[str, Target]:
    """Every tensor that the checkpoint must have, by its name there."""
    spec = model.spec
    fused = spec.architecture == "InternLM2ForCausalLM"
    names = _INTERNLM2 if fused else _LLAMA
    targets = {
        f"{names['embedding']}.weight": Target(model.embedding),
        "model.norm.weight": Target(model.norm),
    }
    if not spec.tied_embeddings:
        targets[f"{names['head']}.weight"] = Target(model.head)
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"model.layers.{index}."
        targets |= _grouped_qkv(layer, prefix) if fused else _separate_qkv(layer, prefix)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "out": layer.out,
            "input_norm": layer.input_norm,
            "post_norm": layer.post_norm,
            "gate": gate,
            "up": up,
            "down": layer.down,
        }
        targets |= {f"{prefix}{names[part]}.weight": Target(to) for part, to in parts.items()}
    return targets


def is_unused(name: str, model: Transformer) -> bool:
    """Whether a checkpoint may hold a tensor that no weight of the model comes from."""
    quantization = model.spec.quantization
    if quantization is not None and quantization.is_unused(name):
        return True
    heads = (f"{_LLAMA['head']}.weight", f"{_INTERNLM2['head']}.weight")
    return name.endswith("rotary_emb.inv_freq") or (model.spec.tied_embeddings and name in heads)


def _separate_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    spec, attention = layer.spec, prefix + "self_attn."
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    targets = {}
    for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
        if fused is not None:
            for part, rows in zip("qkv", fused.split([q_size, kv_size, kv_size]), strict=True):
                targets[f"{attention}{part}_proj.{kind}"] = Target(rows)
    if layer.q_norm is not None and layer.k_norm is not None:
        targets[attention + "q_norm.weight"] = Target(layer.q_norm)
        targets[attention + "k_norm.weight"] = Target(layer.k_norm)
    return targets


def _grouped_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    """InternLM2: for each KV head, its query heads, its key and its value, in one matrix."""
    spec = layer.spec
    rows = torch.arange(len(layer.qkv), device=layer.qkv.device).view(-1, spec.head_dim)
    q, k, v = rows.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
    order = torch.cat([q.unflatten(0, (spec.num_kv_heads, -1)), k[:, None], v[:, None]], dim=1)
    return {prefix + "attention.wqkv.weight": Target(layer.qkv, order.flatten())}
