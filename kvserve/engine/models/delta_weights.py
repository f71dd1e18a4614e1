"""Where the tensors of a checkpoint of Qwen 3.5 go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvserve.engine.models.delta_layers import DeltaLayer, DeltaTransformer
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.weights import Target
from kvserve.kernels.layer.weight_levels import Levels

_PROJECTED = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"]
_NORMS = {"input_norm": "input_layernorm", "post_norm": "post_attention_layernorm"}


def matrix_sources(spec: ModelSpec) -> dict[str, list[str]]:
    """As ``weights.matrix_sources``."""
    sources = {"embedding": ["model.embed_tokens.weight"]}
    if not spec.tied_embeddings:
        sources["head"] = ["lm_head.weight"]
    with_rule = {state.layer for state in spec.states}
    for index in range(spec.num_layers + len(with_rule)):
        parts = {"qkv": [f"self_attn.{part}_proj" for part in "qkv"], "out": ["self_attn.o_proj"]}
        if index in with_rule:
            projected = [f"linear_attn.{part}" for part in _PROJECTED]
            parts = {"projected": projected, "out": ["linear_attn.out_proj"]}
        own, mlp = ("mlp", "mlp") if spec.experts is None else ("mlp.shared", "mlp.shared_expert")
        parts[f"{own}.gate_up"] = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]
        parts[f"{own}.down"] = [f"{mlp}.down_proj"]
        parts |= _of_experts(spec)
        for matrix, names in parts.items():
            kind = "" if matrix.startswith("mlp.experts.") and spec.delta.stacked else ".weight"
            whole = [f"model.layers.{index}.{name}{kind}" for name in names]
            sources[f"layers.{index}.{matrix}"] = whole
    return sources


def _of_experts(spec: ModelSpec) -> dict[str, list[str]]:
    """Sources of a layer's experts, in one tensor or one by one."""
    if spec.experts is None:
        return {}
    every, halves = "mlp.experts", ("gate_proj", "up_proj")
    each = [f"{every}.{expert}" for expert in range(spec.experts.count)]
    gate_up, down = [f"{every}.gate_up_proj"], [f"{every}.down_proj"]
    if not spec.delta.stacked:
        gate_up = [f"{expert}.{half}" for expert in each for half in halves]
        down = [f"{expert}.down_proj" for expert in each]
    return {"mlp.experts.gate_up": gate_up, "mlp.experts.down": down}


def weight_targets(model: DeltaTransformer) -> dict[str, Target]:
    """As ``weights.weight_targets``."""
    spec, targets = model.spec, {"model.norm.weight": Target.whole(model.norm)}
    held = dict(model.named_modules()) | dict(model.named_parameters())
    order = rotated_order(spec)
    for matrix, names in matrix_sources(spec).items():
        stacked = len(names) == 1 and len(held[matrix].shape) == 3
        experts = [held[matrix]] if stacked or len(held[matrix].shape) == 2 else held[matrix]
        parts = [part for one in experts for part in _parts(model, matrix, one, stacked=stacked)]
        targets |= zip(names, parts, strict=True)
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        for own, name in _NORMS.items():
            targets[f"{prefix}{name}.weight"] = Target.whole(getattr(layer, own))
        mlp: Any = layer.mlp
        if spec.experts is not None:
            router, gate = Target.whole(mlp.experts.router), Target.whole(mlp.gate)
            targets[f"{prefix}mlp.gate.weight"] = router
            targets[f"{prefix}mlp.shared_expert_gate.weight"] = gate
        if isinstance(layer, DeltaLayer):
            others = {
                "conv1d.weight": layer.taps.t()[:, None],
                "A_log": layer.decay[0],
                "dt_bias": layer.decay[1],
                "norm.weight": layer.scale,
            }
            targets |= {f"{prefix}linear_attn.{n}": Target.whole(x) for n, x in others.items()}
            continue
        for norm in ("q_norm", "k_norm"):
            whole = Target.whole(getattr(layer, norm))
            targets[f"{prefix}self_attn.{norm}.weight"] = replace(whole, order=order)
    return targets


def rotated_order(spec: ModelSpec) -> Tensor:
    """Where each dimension of a checkpoint's head is in ours, int64 [D].

    It rotates its first dimensions in pairs that are half of these apart; in ours a pair is half a
    head apart, and those that rotate by nothing are pairs, too. Queries and keys are in one order,
    so no product of theirs changes.
    """
    half = int(spec.head_dim * spec.rope.parameters["partial_rotary_factor"]) // 2
    places = torch.arange(spec.head_dim, device="cpu")
    left, right = places.chunk(2)
    taken = left[:half], right[:half], left[half:], right[half:]
    return torch.cat(taken)


def _parts(
    model: DeltaTransformer, matrix: str, tensor: Tensor | Levels, *, stacked: bool
) -> list[Target]:
    """Where each weight of the checkpoint goes in a matrix, or in an expert's."""
    spec, name = model.part, matrix.rpartition(".")[2]
    if stacked:
        return [Target.whole(tensor)]
    if name in ("embedding", "head"):
        return [Target.shared(tensor, model.group, total=spec.vocab_size)]
    if name == "projected":
        return [Target.whole(part) for part in tensor.split(spec.delta.sizes)]
    if name == "gate_up":
        return [Target.whole(part) for part in tensor.chunk(2)]
    if name != "qkv":
        return [Target.whole(tensor)]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    order, device = rotated_order(spec), tensor.device
    # The checkpoint has the query and the gate of each head side by side.
    queries = torch.arange(heads)[:, None] * dim
    with_gates = torch.cat([queries + order, heads * dim + queries + torch.arange(dim)], dim=1)
    keys = torch.arange(kv_heads)[:, None] * dim + order
    q, k, v = tensor.split([2 * heads * dim, kv_heads * dim, kv_heads * dim])
    orders = with_gates.flatten().to(device), keys.flatten().to(device), None
    return [
        replace(Target.whole(part), order=own) for part, own in zip((q, k, v), orders, strict=True)
    ]
