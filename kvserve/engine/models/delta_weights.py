"""Where the tensors of a checkpoint of Qwen 3.5 or Qwen3-Next go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.models.delta_spec import DeltaSpec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.weights import BY_INPUTS, Target
from kvserve.kernels.layer.weight_levels import Levels

if TYPE_CHECKING:
    from kvserve.engine.models.delta_layers import DeltaTransformer

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


def weight_targets(model: DeltaTransformer) -> list[tuple[str, Target]]:
    """As ``weights.weight_targets``."""
    spec, group, delta = model.spec, model.group, model.part.delta
    targets = [("model.norm.weight", Target.whole(model.norm))]
    held: dict[str, Any] = dict(model.named_modules()) | dict(model.named_parameters())
    order = rotated_order(spec)
    for matrix, names in matrix_sources(spec).items():
        whole, experts = held[matrix], [held[matrix]]
        stacked = len(names) == 1 and len(whole.shape) == 3
        if len(whole.shape) == 3 and not stacked:
            experts = [whole[expert] for expert in range(whole.shape[0])]
        parts = [part for one in experts for part in _parts(model, matrix, one, stacked=stacked)]
        targets += [(name, part) for name, own in zip(names, parts, strict=True) for part in own]
    with_rule = {state.layer for state in spec.states}
    layer: Any
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}."
        for own, name in _NORMS.items():
            targets.append((f"{prefix}{name}.weight", Target.whole(getattr(layer, own))))
        if spec.experts is not None:
            router, gate = Target.whole(layer.mlp.experts.router), Target.whole(layer.mlp.gate)
            targets.append((f"{prefix}mlp.gate.weight", router))
            targets.append((f"{prefix}mlp.shared_expert_gate.weight", gate))
        if index in with_rule:
            rule, taps = f"{prefix}linear_attn.", layer.taps.t()[:, None]
            targets += [
                *((f"{rule}conv1d.weight", x) for x in _sections(taps, delta.sections, group)),
                (f"{rule}A_log", Target.shared(layer.decay[0], group)),
                (f"{rule}dt_bias", Target.shared(layer.decay[1], group)),
                (f"{rule}norm.weight", Target.whole(layer.scale)),
            ]
            continue
        for norm in ("q_norm", "k_norm"):
            whole = Target.whole(getattr(layer, norm))
            targets.append((f"{prefix}self_attn.{norm}.weight", replace(whole, order=order)))
    return targets


def _sections(
    tensor: Tensor | Levels, sizes: list[int], group: RankGroup, dim: int = 0
) -> list[Target]:
    """This rank's equal part of each section of the checkpoint's tensor along ``dim``; ``sizes``
    are those of this rank's parts, one behind the other in ``tensor``."""
    found, first = [], 0
    for size in sizes:
        one = Target.shared(tensor.narrow(dim, first, size), group, dim)
        shape, region = list(one.shape), list(one.region)
        start = region[dim].start + first * group.size
        shape[dim], region[dim] = sum(sizes) * group.size, slice(start, start + size)
        found.append(replace(one, shape=tuple(shape), region=tuple(region)))
        first += size
    return found


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


def _projected(
    delta: DeltaSpec, name: str, tensor: Tensor | Levels, group: RankGroup
) -> list[list[Target]]:
    """Of queries, keys, values and gates, of the rule's numbers, or of both."""
    sizes = list(delta.sizes)
    orders: list[Tensor | None] = [None] * len(sizes)
    if delta.grouped:  # a key head's own are side by side
        orders = [_by_key_head(delta, [*delta.sections, delta.values])]
        orders += [_by_key_head(delta, [delta.heads, delta.heads])]
        sizes = [sum(sizes[:2]), sum(sizes[2:])]
    if delta.apart:
        half = len(sizes) // 2
        part = slice(half, None) if name == "rule" else slice(half)
        sizes, orders = sizes[part], orders[part]
    parts = tensor.split(sizes)
    shared = [
        [replace(Target.shared(part, group), order=order)]
        for part, order in zip(parts, orders, strict=True)
    ]
    if not delta.grouped and name == "projected":
        shared[0] = _sections(parts[0], delta.sections, group)
    return shared


def _by_key_head(delta: DeltaSpec, sizes: list[int]) -> Tensor:
    """Where each row of a checkpoint's matrix is in ours, int64 [sum(sizes)]: theirs has each
    part's rows of the first key head, then of the next."""
    parts = torch.arange(sum(sizes), device="cpu").split(sizes)
    return torch.cat([part.view(delta.key_heads, -1) for part in parts], dim=1).flatten()


def _parts(
    model: DeltaTransformer, matrix: str, tensor: Tensor | Levels, *, stacked: bool
) -> list[list[Target]]:
    """Where each weight of the checkpoint goes in a matrix, or in an expert's: in parts."""
    spec, group, name = model.part, model.group, matrix.rpartition(".")[2]
    if name in BY_INPUTS:
        return [[Target.shared(tensor, group, dim=1 + stacked)]]
    if stacked:
        return [_sections(tensor, [tensor.shape[1] // 2] * 2, group, dim=1)]
    if name in ("embedding", "head"):
        return [[Target.shared(tensor, group, total=spec.vocab_size)]]
    if name in ("projected", "rule"):
        return _projected(spec.delta, name, tensor, group)
    if name == "gate_up":
        return [[Target.shared(part, group)] for part in tensor.chunk(2)]
    heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    order, device = rotated_order(spec), tensor.device
    # The checkpoint has the query and the gate of each head side by side.
    queries = torch.arange(heads)[:, None] * dim
    with_gates = torch.cat([queries + order, heads * dim + queries + torch.arange(dim)], dim=1)
    keys = torch.arange(kv_heads)[:, None] * dim + order
    q, k, v = tensor.split([2 * heads * dim, kv_heads * dim, kv_heads * dim])
    orders = with_gates.flatten().to(device), keys.flatten().to(device), None
    return [
        [replace(Target.shared(part, group), order=own)]
        for part, own in zip((q, k, v), orders, strict=True)
    ]
