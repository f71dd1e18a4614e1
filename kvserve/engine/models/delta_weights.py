"""Where the tensors of a checkpoint of Qwen 3.5 or Qwen3-Next go."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvserve.engine.models.delta_layers import DeltaLayer, DeltaTransformer
from kvserve.engine.models.delta_spec import DeltaSpec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.weights import Target
from kvserve.kernels.layer.weight_levels import Levels

_PROJECTED, _OF_RULE = ["in_proj_qkv", "in_proj_z"], ["in_proj_b", "in_proj_a"]
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
            parts = {"projected": _PROJECTED, "rule": _OF_RULE, "out": ["out_proj"]}
            if spec.delta.grouped:
                parts |= {"projected": ["in_proj_qkvz"], "rule": ["in_proj_ba"]}
            if not spec.delta.apart:
                parts["projected"] = [*parts["projected"], *parts.pop("rule")]
            parts = {own: [f"linear_attn.{name}" for name in names] for own, names in parts.items()}
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
    held: dict[str, Any] = dict(model.named_modules()) | dict(model.named_parameters())
    order = rotated_order(spec)
    for matrix, names in matrix_sources(spec).items():
        whole, experts = held[matrix], [held[matrix]]
        stacked = len(names) == 1 and len(whole.shape) == 3
        if len(whole.shape) == 3 and not stacked:
            experts = [whole[expert] for expert in range(whole.shape[0])]
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


def _projected(spec: ModelSpec, name: str, tensor: Tensor | Levels) -> list[Target]:
    """Of queries, keys, values and gates, of the rule's numbers, or of both."""
    delta = spec.delta
    sizes = list(delta.sizes)
    orders: list[Tensor | None] = [None] * len(sizes)
    if delta.grouped:  # a key head's own are side by side
        keys, values = delta.key_heads * delta.key_dim, delta.values
        orders = [_by_key_head(delta, [keys, keys, values, values])]
        orders += [_by_key_head(delta, [delta.heads, delta.heads])]
        sizes = [sum(sizes[:2]), sum(sizes[2:])]
    if delta.apart:
        half = len(sizes) // 2
        part = slice(half, None) if name == "rule" else slice(half)
        sizes, orders = sizes[part], orders[part]
    return [
        replace(Target.whole(part), order=order)
        for part, order in zip(tensor.split(sizes), orders, strict=True)
    ]


def _by_key_head(delta: DeltaSpec, sizes: list[int]) -> Tensor:
    """Where each row of a checkpoint's matrix is in ours, int64 [sum(sizes)]: theirs has each
    part's rows of the first key head, then of the next."""
    parts = torch.arange(sum(sizes), device="cpu").split(sizes)
    return torch.cat([part.view(delta.key_heads, -1) for part in parts], dim=1).flatten()


def _parts(
    model: DeltaTransformer, matrix: str, tensor: Tensor | Levels, *, stacked: bool
) -> list[Target]:
    """Where each weight of the checkpoint goes in a matrix, or in an expert's."""
    spec, name = model.part, matrix.rpartition(".")[2]
    if stacked:
        return [Target.whole(tensor)]
    if name in ("embedding", "head"):
        return [Target.shared(tensor, model.group, total=spec.vocab_size)]
    if name in ("projected", "rule"):
        return _projected(spec, name, tensor)
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
