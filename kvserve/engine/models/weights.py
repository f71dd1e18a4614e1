"""Where each tensor of a checkpoint goes: its name, and its place in the decoder's matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.storage import Region
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
    """A parameter or a part of one, and the ``region`` of a checkpoint's tensor that belongs there.

    ``shape`` is the whole tensor's. Row i of the region is row ``order[i]`` of the parameter.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    region: Region
    order: Tensor | None = None

    @classmethod
    def whole(cls, tensor: Tensor) -> Target:
        """All of a tensor, on every rank."""
        shape = tuple(tensor.shape)
        return cls(tensor, shape, tuple(slice(0, size) for size in shape))

    @classmethod
    def shared(
        cls, tensor: Tensor, group: RankGroup, dim: int = 0, total: int | None = None
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
        rows, *others = (
            slice(part.start - region.start, part.stop - region.start)
            for part, region in zip(place, self.region, strict=False)
        )
        at = rows if self.order is None else self.order[rows]
        self.tensor[(at, *others)] = values.to(self.tensor.device)


def weight_targets(model: Transformer) -> dict[str, Target]:
    """Every tensor that the checkpoint must have, by its name there."""
    spec, group, vocab = model.spec, model.group, model.spec.vocab_size
    fused = spec.architecture == "InternLM2ForCausalLM"
    names = _INTERNLM2 if fused else _LLAMA
    targets = {
        f"{names['embedding']}.weight": Target.shared(model.embedding, group, total=vocab),
        "model.norm.weight": Target.whole(model.norm),
    }
    if not spec.tied_embeddings:
        targets[f"{names['head']}.weight"] = Target.shared(model.head, group, total=vocab)
    for index, layer in enumerate(model.decoder_layers):
        prefix = f"model.layers.{index}."
        targets |= _grouped_qkv(layer, prefix) if fused else _separate_qkv(layer, prefix)
        gate, up = layer.gate_up.chunk(2)
        parts = {
            "out": Target.shared(layer.out, group, dim=1),
            "input_norm": Target.whole(layer.input_norm),
            "post_norm": Target.whole(layer.post_norm),
            "gate": Target.shared(gate, group),
            "up": Target.shared(up, group),
            "down": Target.shared(layer.down, group, dim=1),
        }
        targets |= {f"{prefix}{names[part]}.weight": target for part, target in parts.items()}
        targets |= _scales(layer, prefix, names)
    return targets


def is_unused(name: str, model: Transformer) -> bool:
    """Whether the checkpoint may hold this tensor although the model does not use it."""
    quantization = model.spec.quantization
    if quantization is not None and quantization.is_unused(name):
        return True
    heads = (f"{_LLAMA['head']}.weight", f"{_INTERNLM2['head']}.weight")
    return name.endswith("rotary_emb.inv_freq") or (model.spec.tied_embeddings and name in heads)


def _separate_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    spec, attention = layer.spec, prefix + "self_attn."
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    targets = {}
    kinds = {"weight": layer.qkv, "weight_scale": layer.qkv_scales, "bias": layer.qkv_bias}
    for kind, fused in kinds.items():
        if fused is not None:
            for part, rows in zip("qkv", fused.split([q_size, kv_size, kv_size]), strict=True):
                targets[f"{attention}{part}_proj.{kind}"] = Target.shared(rows, layer.group)
    if layer.q_norm is not None and layer.k_norm is not None:
        targets[attention + "q_norm.weight"] = Target.whole(layer.q_norm)
        targets[attention + "k_norm.weight"] = Target.whole(layer.k_norm)
    return targets


def _grouped_qkv(layer: Layer, prefix: str) -> dict[str, Target]:
    """InternLM2: for each KV head, its query heads, its key and its value, in one matrix."""
    spec = layer.spec
    rows = torch.arange(len(layer.qkv), device=layer.qkv.device).view(-1, spec.head_dim)
    q, k, v = rows.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads])
    order = torch.cat([q.unflatten(0, (spec.num_kv_heads, -1)), k[:, None], v[:, None]], dim=1)
    parts = {"weight": layer.qkv, "weight_scale": layer.qkv_scales}
    return {
        f"{prefix}attention.wqkv.{part}": replace(
            Target.shared(tensor, layer.group), order=order.flatten()
        )
        for part, tensor in parts.items()
        if tensor is not None
    }


def _scales(layer: Layer, prefix: str, names: dict[str, str]) -> dict[str, Target]:
    """Scales of matrices held as FP8; those of qkv come with its parts."""
    if layer.out_scales is None or layer.gate_up_scales is None or layer.down_scales is None:
        return {}
    gate, up = layer.gate_up_scales.chunk(2)
    parts = {
        "out": Target.whole(layer.out_scales),
        "gate": Target.shared(gate, layer.group),
        "up": Target.shared(up, layer.group),
        "down": Target.whole(layer.down_scales),
    }
    return {f"{prefix}{names[part]}.weight_scale": target for part, target in parts.items()}
