"""A config.json read field by field, and what is a family's own: its flags, and the fields that
only it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvserve.engine.models.counts import MOST
from kvserve.log import ConfigError, shown

_LARGEST = 1e30
"""Above any number that a config has; neither infinite nor NaN is below it."""


@dataclass(frozen=True)
class Fields:
    """A config.json read field by field; null counts as absent."""

    raw: Mapping[str, Any]
    where: str

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"--model: {self.where} {problem}")

    def absent(self, name: str, why: str = "") -> ConfigError:
        return self.error(
            f"has no field {name!r}{why}; fetch it again, or set it by --hf-overrides"
        )

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer of 31 bits."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.absent(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
            raise self.error(f"sets {name} to {shown(value)}, no positive integer of 31 bits")
        return value

    def number(self, name: str, default: float, *, above: float = -_LARGEST) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or not above < value < _LARGEST:
            least = "" if above == -_LARGEST else f" above {above:g}"
            raise self.error(f"sets {name} to {shown(value)}, which is no number{least}")
        return float(value)

    def listed(self, name: str) -> list[Any] | None:
        value = self.raw.get(name)
        if not isinstance(value, list | None):
            raise self.error(f"sets {name} to {shown(value)}, which is no list")
        return value

    def part(self, name: str) -> dict[str, Any]:
        """A JSON object in the object, empty where it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(f"sets {name} to {shown(value)}, which is no JSON object")
        return dict(value)


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of ``count`` experts in all layers but those in ``dense``: each token goes to
    ``per_token`` of them, whose weights add up to one if ``normalised``. With a ``limit`` their
    activation is clamped there, and ``alpha`` is in its sigmoid. ``shared``:
    beside them is an MLP of all tokens, whose answer has a gate."""

    count: int
    per_token: int
    intermediate_size: int
    normalised: bool
    dense: frozenset[int] = frozenset()
    limit: float | None = None
    alpha: float = 1.0
    shared: bool = False


@dataclass(frozen=True)
class Flags:
    """What a family's layers have.

    ``qk_norm``: queries and keys are normalised, by head or over all heads (``"width"``).
    ``norms``: of what a layer's halves read (``before``), of what they add (``after``), or both;
    ``norms_from_one``: their weights count from 1. ``sinks``: each head has a logit that takes
    part in its softmax and carries no value.
    """

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    norms: str = "before"
    norms_from_one: bool = False
    activation: str = "silu"
    sinks: bool = False


@dataclass(frozen=True)
class Variant(Flags):
    """A family's flags, and what its files leave out: ``head_dim``, whether embeddings are
    ``tied``, the base of RoPE in layers with windows (``local_theta``), and whether
    max_position_embeddings counts scaled RoPE already (``states_longest``)."""

    head_dim: int | None = None
    tied: bool = False
    local_theta: float | None = None
    states_longest: bool = False


_GEMMA = Variant(
    norms="both", norms_from_one=True, activation="gelu_pytorch_tanh", head_dim=256, tied=True
)
VARIANTS = {
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": replace(_GEMMA, qk_norm="head", local_theta=1e4, states_longest=True),
    "GptOssForCausalLM": Variant(qkv_bias=True, out_bias=True, sinks=True, states_longest=True),
    "GraniteForCausalLM": Variant(),
    "InternLM2ForCausalLM": Variant(),
    "LlamaForCausalLM": Variant(),
    "MistralForCausalLM": Variant(),
    "MixtralForCausalLM": Variant(),
    "Olmo2ForCausalLM": Variant(qk_norm="width", norms="after"),
    "Phi3ForCausalLM": Variant(),
    "Qwen2ForCausalLM": Variant(qkv_bias=True),
    "Qwen3ForCausalLM": Variant(qk_norm="head"),
    "Qwen3MoeForCausalLM": Variant(qk_norm="head"),
    "SmolLM3ForCausalLM": Variant(),
}


UNDIVIDED = {
    "GptOssForCausalLM": "stores the gates and ups of experts in turns",
    "Olmo2ForCausalLM": "normalises queries and keys over all heads",
    "Phi3ForCausalLM": "stores the projections of all heads in one matrix",
}
"""Families that one rank has to run, and why."""


_FULL_EVERY = {
    "Gemma2ForCausalLM": (2, 4096),
    "Gemma3ForCausalLM": (6, 4096),
    "GptOssForCausalLM": (2, 128),
}
"""Of so many layers one sees all tokens, and the others so many, unless config.json says."""


def windows_of(config: Fields, architecture: str, layers: int) -> dict[str, Any]:
    """``window`` and ``windowed``, as transformers decides them: Mistral's layers all have one,
    those of Mixtral and Phi-3 if they state it, those of Qwen and SmolLM3 by layer, others never.
    """
    none: dict[str, Any] = {"window": None, "windowed": frozenset()}
    if config.raw.get("sliding_window", "absent") is None:
        return none
    every, some = frozenset(range(layers)), _layers_of_type(config, layers)
    window = 4096
    if architecture in _FULL_EVERY:
        step, window = _FULL_EVERY[architecture]
        step = config.count("sliding_window_pattern", step)
        windowed = frozenset(n for n in every if (n + 1) % step) if some is None else some
    elif architecture == "MistralForCausalLM":
        windowed = every
    elif architecture in ("MixtralForCausalLM", "Phi3ForCausalLM"):
        windowed = every if "sliding_window" in config.raw else frozenset()
    elif not config.raw.get("use_sliding_window"):
        return none
    elif architecture == "Qwen3MoeForCausalLM":
        windowed = every
    elif architecture.startswith("Qwen"):
        first = config.count("max_window_layers", 28)
        windowed = frozenset(range(first, layers)) if some is None else some
    elif architecture == "SmolLM3ForCausalLM":
        unrotated = layers_without_rope(config, architecture, layers)
        windowed = unrotated if some is None else some
    else:
        return none
    if not windowed:
        return none
    return {"window": config.count("sliding_window", window), "windowed": windowed}


def _layers_of_type(config: Fields, layers: int) -> frozenset[int] | None:
    """The layers that ``layer_types`` calls sliding, if it is there."""
    types = config.listed("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if len(types) != layers or not all(kind in known for kind in types):
        raise config.error(f"has layer_types {shown(types)} for {layers} layers")
    return frozenset(n for n, kind in enumerate(types) if kind == "sliding_attention")


def experts_of(config: Fields, architecture: str, layers: int) -> ExpertSpec | None:
    per_token = "num_experts_per_tok"
    if architecture in ("MixtralForCausalLM", "GptOssForCausalLM"):
        count, width = config.count("num_local_experts"), config.count("intermediate_size")
        found = ExpertSpec(count, config.count(per_token), width, normalised=True)
        if architecture == "GptOssForCausalLM":
            limit, alpha = config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)
            found = replace(found, limit=limit, alpha=alpha)
    elif architecture == "Qwen3MoeForCausalLM":
        step, always = config.count("decoder_sparse_step", 1), config.listed("mlp_only_layers")
        dense = {n for n in range(layers) if (n + 1) % step or n in (always or ())}
        found = ExpertSpec(
            config.count("num_experts", config.raw.get("num_local_experts")),  # both are written
            config.count(per_token),
            config.count("moe_intermediate_size"),
            bool(config.raw.get("norm_topk_prob", False)),
            frozenset(dense),
        )
    else:
        return None
    if found.per_token > found.count:
        raise config.error(f"sends a token to {found.per_token} of {found.count} experts")
    return found


def layers_without_rope(config: Fields, architecture: str, layers: int) -> frozenset[int]:
    """SmolLM3: ``no_rope_layers`` has a 0 for each layer that rotates nothing."""
    if architecture != "SmolLM3ForCausalLM":
        return frozenset()
    every = config.count("no_rope_layer_interval", 4)
    rotates = config.listed("no_rope_layers") or [(n + 1) % every for n in range(layers)]
    if len(rotates) != layers:
        raise config.error(f"has no_rope_layers for {len(rotates)} of {layers} layers")
    return frozenset(layer for layer in range(layers) if not rotates[layer])


def scales_of(config: Fields, architecture: str, head_dim: int) -> dict[str, Any]:
    """What Granite and Gemma multiply by, and where Gemma caps."""
    if architecture.startswith("Gemma"):
        first = architecture == "Gemma2ForCausalLM"
        caps = {"soft_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"}
        usual = {"soft_cap": 50.0 * first, "logits_cap": 30.0 * first}
        asked = config.number("query_pre_attn_scalar", 256)
        return {
            **{
                name: config.number(field, 0.0 if field in config.raw else usual[name])
                for name, field in caps.items()
            },
            "embedding_scale": config.count("hidden_size") ** 0.5,
            "query_scale": (head_dim / asked) ** 0.5,
        }
    if architecture != "GraniteForCausalLM":
        return {}
    return {
        "embedding_scale": config.number("embedding_multiplier", 1.0),
        "query_scale": config.number("attention_multiplier", 1.0) * head_dim**0.5,
        "residual_scale": config.number("residual_multiplier", 1.0),
        "logits_divisor": config.number("logits_scaling", 1.0),
    }
