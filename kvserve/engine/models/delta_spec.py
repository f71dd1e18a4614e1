"""What config.json says of a decoder with layers of the gated delta rule (Qwen 3.5, Qwen3-Next),
and why our own layers do not run it, if so. Its other layers are those of Qwen 3, with gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvserve.config import ModelConfig
from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.families import ExpertSpec, Fields
from kvserve.engine.models.spec import ModelSpec, architecture_of, parse_spec
from kvserve.late import Late
from kvserve.log import ConfigError, shown
from kvserve.scheduler.layout import LayerState

_decoder = Late("engine.models.delta_layers:DeltaTransformer")
_layers_refusal = Late("engine.models.delta_layers:refusal")
_LINEAR, _FULL = "linear_attention", "full_attention"
_NEXT = "Qwen3NextForCausalLM"
_EXPERTS = {"Qwen3_5MoeForCausalLM": (256, 8), _NEXT: (512, 10)}
"""How many a layer has, and how many a token goes to, unless config.json says."""


@dataclass(frozen=True)
class DeltaSpec:
    """Heads of the rule, ``heads`` of values for ``key_heads`` of keys and queries, and how many
    ``taps`` the convolution before it has. The file may have all experts of a layer in one tensor
    (``stacked``). ``apart``: what the rule's strengths and time steps are made of is a matrix of
    its own, since quantised files leave it plain. ``grouped``: the file has what belongs to a key
    head side by side, as Qwen3-Next's."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    stacked: bool = False
    apart: bool = False
    grouped: bool = False

    @property
    def channels(self) -> int:
        """Of queries, keys and values together."""
        return sum(self.sections)

    @property
    def values(self) -> int:
        return self.heads * self.value_dim

    @property
    def sections(self) -> list[int]:
        """Of queries, of keys and of values."""
        return [self.key_heads * self.key_dim] * 2 + [self.values]

    @property
    def sizes(self) -> list[int]:
        """Of what a layer computes of a token first: queries, keys and values; gates; the rule's
        strengths, and its time steps."""
        return [self.channels, self.values, self.heads, self.heads]

    def divided(self, part: ModelSpec, ranks: int) -> ModelSpec:
        """What one of ``ranks`` ranks, whose other layers ``part`` is of, has of the model's."""
        heads = self.key_heads // ranks, self.heads // ranks
        own = replace(self, key_heads=heads[0], heads=heads[1])
        return replace(part, delta=own, states=tuple(own.state(x.layer) for x in part.states))

    def as_stored(self, spec: ModelSpec, checkpoint: Checkpoint) -> ModelSpec:
        """``spec``, whose part this is, of a checkpoint that has experts in one tensor each, or one
        by one."""
        first = "model.layers.0.mlp.experts.gate_up_proj"
        if f"{first}_scale_inv" in checkpoint.names:
            raise ConfigError(
                f"--model: {checkpoint.file(first)} has {first} in FP8, all experts in one tensor; "
                "kvserve reads experts in FP8 one by one, as Qwen publishes them"
            )
        return replace(spec, delta=replace(self, stacked=first in checkpoint.names))

    def state(self, layer: int) -> LayerState:
        """What a layer keeps of a row."""
        recurrent = self.heads, self.key_dim, self.value_dim
        return LayerState(layer, (self.channels, self.taps - 1), recurrent)


def native_spec(
    raw: Mapping[str, Any], where: str, model: ModelConfig, device: str
) -> ModelSpec | None:
    """The spec for our own layers; ``None`` where ``--model-impl auto`` has transformers' modules
    run it. ``ConfigError`` for a config that is damaged, or where these were asked for."""
    config = Fields(raw, where)
    delta, why = _delta_of(config), _refusal(config, model, device)
    if why is None:
        return _spec_of(config, delta)
    if model.model_impl == "native":
        raise ConfigError(f"--model-impl native: {architecture_of(raw)} {why}")
    return None


def _delta_of(config: Fields) -> DeltaSpec:
    found = DeltaSpec(
        config.count("linear_num_key_heads", 16),
        config.count("linear_num_value_heads", 32),
        config.count("linear_key_head_dim", 128),
        config.count("linear_value_head_dim", 128),
        config.count("linear_conv_kernel_dim", 4),
    )
    if found.heads % found.key_heads:
        raise config.error(f"has {found.heads} value heads for {found.key_heads} key heads")
    return found


def _experts_of(config: Fields) -> ExpertSpec | None:
    """Those of every layer, beside an MLP of all tokens."""
    if architecture_of(config.raw) not in _EXPERTS or not any(_with_experts(config)):
        return None
    count, per_token = _EXPERTS[architecture_of(config.raw)]
    experts = ExpertSpec(
        config.count("num_experts", count),
        config.count("num_experts_per_tok", per_token),
        config.count("moe_intermediate_size", 512),
        normalised=config.raw.get("norm_topk_prob") is not False,
        shared=True,
    )
    if experts.per_token > experts.count:
        raise config.error(f"sends a token to {experts.per_token} of {experts.count} experts")
    return experts


def _with_experts(config: Fields) -> list[bool]:
    """Which layers have them. Qwen 3.5 has no field of these."""
    layers, dense = config.count("num_hidden_layers"), config.listed("mlp_only_layers") or []
    if architecture_of(config.raw) != _NEXT:
        return [True] * layers
    step, none = config.count("decoder_sparse_step", 1), config.raw.get("num_experts") == 0
    return [not none and n not in dense and (n + 1) % step == 0 for n in range(layers)]


def _refusal(config: Fields, model: ModelConfig, device: str) -> str | None:
    """Why our own layers do not run it here."""
    delta, rope, raw = _delta_of(config), _rope_of(config), config.raw
    if (why := _layers_refusal(delta, model.dtype, device)) is not None:
        return str(why)
    if device != "cpu" and model.dtype not in ("auto", "bfloat16") and _experts_of(config):
        return f"has experts, whose products are in bfloat16 on a GPU, not in {model.dtype}"
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "rotates parts of heads by scaled RoPE, which is not built"
    if raw.get("attn_output_gate") is False or raw.get("attention_bias"):
        return "has attention without gates or with biases, which is not built"
    if len(set(_with_experts(config))) > 1:
        return "has layers with experts and layers without, which is not built"
    if (raw.get("hidden_act") or "silu") != "silu":
        return f"has {raw['hidden_act']} for its activation, which is not built"
    return None


def _rope_of(config: Fields) -> dict[str, Any]:
    return config.part("rope_parameters") or config.part("rope_scaling")


def _spec_of(config: Fields, delta: DeltaSpec) -> ModelSpec:
    """That of Qwen 3 with this config, and what is special."""
    rope, raw = _rope_of(config), config.raw
    share = Fields(rope, config.where).number("partial_rotary_factor", -1.0)
    if share < 0:
        share = config.number("partial_rotary_factor", 0.25)
    special = "partial_rotary_factor", "layer_types", "rope_scaling", "rope_parameters"
    plain = {name: value for name, value in raw.items() if name not in special}
    plain["rope_parameters"] = {n: x for n, x in rope.items() if n != "partial_rotary_factor"}
    plain |= {"architectures": ["Qwen3ForCausalLM"], "head_dim": config.count("head_dim", 256)}
    experts = _experts_of(config)
    if experts is not None:  # of the MLP that all tokens go to
        plain["intermediate_size"] = config.count("shared_expert_intermediate_size", 512)
    spec = parse_spec(plain, config.where)
    rotated = spec.head_dim * share
    if rotated != int(rotated) or rotated % 2 or not 0 < rotated <= spec.head_dim:
        raise config.error(f"rotates {rotated:g} of {spec.head_dim} dimensions of a head")
    states = tuple(delta.state(n) for n, kind in enumerate(_kinds_of(config, spec)) if kind)
    if len(states) == spec.num_layers:
        raise config.error("has no layer with keys and values, which kvserve needs")
    return replace(
        spec,
        architecture=architecture_of(raw),
        num_layers=spec.num_layers - len(states),
        norms_from_one=True,
        rope=replace(spec.rope, parameters={"partial_rotary_factor": share}),
        states=states,
        decoder=_decoder,
        experts=experts,
        delta=replace(
            delta,
            apart=spec.quantization is not None or bool(spec.stored_as),
            grouped=architecture_of(raw) == _NEXT and not spec.stored_as,
        ),
    )


def _kinds_of(config: Fields, spec: ModelSpec) -> list[bool]:
    """Which layers have the rule."""
    layers, kinds = spec.num_layers, config.listed("layer_types")
    every = config.count("full_attention_interval", 4)
    if kinds is None:
        return [bool((layer + 1) % every) for layer in range(layers)]
    if len(kinds) != layers or not {*kinds} <= {_LINEAR, _FULL}:
        raise config.error(f"has layer_types {shown(kinds)} for {layers} layers")
    return [kind == _LINEAR for kind in kinds]
