"""Where each tensor of a checkpoint goes: its name, and its place in the decoder's matrices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.feed_forward import Mlp
from kvserve.engine.models.plain_storage import Region, rows_per_piece
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.late import Late

if TYPE_CHECKING:
    from kvserve.engine.models.storage import LevelPiece
    from kvserve.kernels.layer.weight_levels import Levels

_delta_sources = Late("engine.models.delta_weights:matrix_sources")
_delta_targets = Late("engine.models.delta_weights:weight_targets")
_LLAMA = {
    "embedding": "model.embed_tokens",
    "head": "lm_head",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "router": "mlp.gate",
    "expert": "mlp.experts.{}.",
    "expert_gate": "gate_proj",
    "expert_up": "up_proj",
    "expert_down": "down_proj",
}
_INTERNLM2 = {
    "embedding": "model.tok_embeddings",
    "head": "output",
    "qkv": "attention.wqkv",
    "out": "attention.wo",
    "input_norm": "attention_norm",
    "post_norm": "ffn_norm",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
}
_GEMMA = {
    **_LLAMA,
    "after_attention": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "after_mlp": "post_feedforward_layernorm",
}
_GPT_OSS = {
    **_LLAMA,
    "router": "mlp.router",
    "experts_gate_up": "mlp.experts.gate_up_proj",
    "experts_down": "mlp.experts.down_proj",
}
_MIXTRAL = {
    **_LLAMA,
    "router": "block_sparse_moe.gate",
    "expert": "block_sparse_moe.experts.{}.",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}
_OLMO2 = {
    **_LLAMA,
    "input_norm": "post_attention_layernorm",
    "post_norm": "post_feedforward_layernorm",
}
_NAMES = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "GptOssForCausalLM": _GPT_OSS,
    "InternLM2ForCausalLM": _INTERNLM2,
    "MixtralForCausalLM": _MIXTRAL,
    "Olmo2ForCausalLM": _OLMO2,
    "Phi3ForCausalLM": {**_LLAMA, "qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"},
}
ALL_EXPERTS = (_GPT_OSS["experts_gate_up"], _GPT_OSS["experts_down"])
"""How tensors' names end that hold all experts at once, undivided: gpt-oss's, which are transposed
where they are no MXFP4."""
BY_INPUTS = ("out", "down")
"""How matrices end of which ranks have parts of the inputs; of others, of the outputs."""


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
        assert not isinstance(held, Tensor)
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
    rows, and of its experts."""
    if spec.delta is not None:
        return cast(dict[str, list[str]], _delta_sources(spec))
    names = _NAMES.get(spec.architecture, _LLAMA)
    sources = {"embedding": [f"{names['embedding']}.weight"]}
    if not spec.tied_embeddings:
        sources["head"] = [f"{names['head']}.weight"]
    qkv = [names["qkv"]] if "qkv" in names else [names["q"], names["k"], names["v"]]
    gate_up = [names["gate_up"]] if "gate_up" in names else [names["gate"], names["up"]]
    for index in range(spec.num_layers):
        prefix, experts = f"model.layers.{index}.", spec.experts_of(index)
        own = {"qkv": qkv, "out": [names["out"]]}
        if experts is None:
            own |= {"mlp.gate_up": gate_up, "mlp.down": [names["down"]]}
        elif "experts_down" in names:
            for matrix in ("gate_up", "down"):
                sources[f"layers.{index}.mlp.{matrix}"] = [prefix + names[f"experts_{matrix}"]]
        else:
            each = [names["expert"].format(expert) for expert in range(experts.count)]
            halves = names["expert_gate"], names["expert_up"]
            own["mlp.gate_up"] = [name + half for name in each for half in halves]
            own["mlp.down"] = [name + names["expert_down"] for name in each]
        for matrix, parts in own.items():
            sources[f"layers.{index}.{matrix}"] = [f"{prefix}{part}.weight" for part in parts]
    return sources


def weight_targets(model: Transformer) -> list[tuple[str, Target]]:
    """Every tensor that the checkpoint must have, by its name there; in parts, if it has some."""
    if model.spec.delta is not None:
        return cast(list[tuple[str, Target]], _delta_targets(model))
    targets = {"model.norm.weight": Target.whole(model.norm)}
    held: dict[str, Any] = dict(model.named_modules()) | dict(model.named_parameters())
    for matrix, sources in matrix_sources(model.spec).items():
        if sources[0].endswith(ALL_EXPERTS):
            targets[sources[0]] = Target.whole(held[matrix])
            continue
        targets |= zip(sources, _parts(model, matrix, held[matrix], len(sources)), strict=True)
        if matrix.endswith("qkv") and model.spec.qkv_bias:
            biases = [name.removesuffix("weight") + "bias" for name in sources]
            parts = _parts(model, matrix, held[f"{matrix}_bias"], len(biases))
            targets |= zip(biases, parts, strict=True)
    names = _NAMES.get(model.spec.architecture, _LLAMA)
    for index, layer in enumerate(model.decoder_layers):
        others: dict[str, Any] = {
            f"{names['input_norm']}.weight": layer.input_norm,
            f"{names['post_norm']}.weight": layer.post_norm,
            f"{names.get('after_attention')}.weight": layer.after_attention,
            f"{names.get('after_mlp')}.weight": layer.after_mlp,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.sinks": layer.sinks,
            f"{names['out']}.bias": layer.out_bias,
        }
        if not isinstance(layer.mlp, Mlp):
            others[f"{names['router']}.weight"] = layer.mlp.router
            others[f"{names['router']}.bias"] = layer.mlp.router_bias
            of_gate_up, of_down = (f"{name}_bias" for name in ALL_EXPERTS)
            others |= {of_gate_up: layer.mlp.gate_up_bias, of_down: layer.mlp.down_bias}
        for name, tensor in others.items():
            if tensor is not None:
                targets[f"model.layers.{index}.{name}"] = Target.whole(tensor)
    return list(targets.items())


def _parts(model: Transformer, matrix: str, tensor: Any, count: int) -> list[Target]:
    """Where each of ``count`` weights of the checkpoint goes in a matrix, or in its bias."""
    spec, group = model.part, model.group
    if len(tensor.shape) == 3:
        experts = tensor.shape[0]
        own = [_parts(model, matrix, tensor[i], count // experts) for i in range(experts)]
        return [part for parts in own for part in parts]
    if matrix in ("embedding", "head"):
        return [Target.shared(tensor, group, total=spec.vocab_size)]
    if matrix.endswith(BY_INPUTS):
        return [Target.shared(tensor, group, dim=1)]
    if count == 3:  # q, k and v
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = tensor.split([q_size, kv_size, kv_size])
    else:
        rows = tensor.chunk(count)
    order = None
    if spec.architecture == "InternLM2ForCausalLM" and matrix.endswith("qkv"):
        order = _by_kv_head(spec).to(tensor.device)
    return [replace(Target.shared(part, group), order=order) for part in rows]


def _by_kv_head(spec: ModelSpec) -> Tensor:
    """InternLM2's matrix has, for each KV head, its query heads, its key and its value."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * spec.head_dim).view(-1, spec.head_dim)
    q, k, v = rows.split([heads, kv_heads, kv_heads])
    return torch.cat([q.unflatten(0, (kv_heads, -1)), k[:, None], v[:, None]], dim=1).flatten()


def has_own_head(checkpoint: Checkpoint, spec: ModelSpec) -> bool:
    """Whether the file has a head that is not the embedding: whether they are tied, a config.json
    may leave out, a class get wrong, and a fine-tuned head outgrow. Many files store a tied one."""
    names = _NAMES.get(spec.architecture, _LLAMA)
    head, table = f"{names['head']}.weight", f"{names['embedding']}.weight"
    stored = {name for name in checkpoint.names if name.startswith(f"{names['head']}.")}
    if stored != {head} or table not in checkpoint.names:
        return bool(stored)
    shape = checkpoint.shape(head)
    if shape != checkpoint.shape(table):
        return True
    size, whole = rows_per_piece(shape[1:]), tuple(slice(0, count) for count in shape)
    return any(
        not torch.equal(one[1].float(), other[1].float())
        for one, other in zip(
            checkpoint.pieces(head, size, whole), checkpoint.pieces(table, size, whole), strict=True
        )
    )


def is_unused(name: str, model: Transformer) -> bool:
    """Whether the checkpoint may hold this tensor although the model does not use it."""
    quantization = model.spec.quantization
    if quantization is not None and quantization.is_unused(name):
        return True
    heads = (f"{_LLAMA['head']}.weight", f"{_INTERNLM2['head']}.weight")
    if model.spec.delta is not None and name.startswith("mtp."):  # it guesses further tokens
        return True
    return name.endswith("rotary_emb.inv_freq") or (model.spec.tied_embeddings and name in heads)
