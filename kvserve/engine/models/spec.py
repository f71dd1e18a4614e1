"""What kvserve needs to know of a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvserve.log import ConfigError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base, type and the type's own numbers."""

    theta: float
    kind: str = "default"
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family as numbers and flags."""

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class _Variant:
    qkv_bias: bool = False
    qk_norm: bool = False


VARIANTS = {
    "LlamaForCausalLM": _Variant(),
    "MistralForCausalLM": _Variant(),
    "Qwen2ForCausalLM": _Variant(qkv_bias=True),
    "Qwen3ForCausalLM": _Variant(qk_norm=True),
}


def read_spec(directory: Path) -> ModelSpec:
    """Parse ``config.json``; ``ConfigError`` names the field that is missing or unknown."""
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--model: no config.json in {directory}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"--model: {path} is not valid JSON ({error})") from None
    return parse_spec(raw, str(path))


def parse_spec(raw: Mapping[str, Any], where: str) -> ModelSpec:
    """Build a spec from the content of a config.json; ``where`` is named in errors."""

    def need(name: str) -> Any:
        if raw.get(name) is None:
            raise ConfigError(f"--model: {where} has no field {name!r}")
        return raw[name]

    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in VARIANTS:
        raise ConfigError(
            f"--model: {where} names architecture {architecture}; kvserve runs "
            f"{', '.join(sorted(VARIANTS))}"
        )
    if raw.get("use_sliding_window") or (
        architecture == "MistralForCausalLM" and raw.get("sliding_window")
    ):
        raise ConfigError(f"--model: {where} has sliding-window layers, which kvserve does not run")
    if raw.get("quantization_config"):
        raise ConfigError(f"--model: {where} is quantised, which kvserve does not read yet")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise ConfigError(f"--model: {where} sets {name}, which kvserve does not run")
    variant = VARIANTS[architecture]
    heads = need("num_attention_heads")
    eos = raw.get("eos_token_id")
    return ModelSpec(
        architecture=architecture,
        num_layers=need("num_hidden_layers"),
        hidden_size=need("hidden_size"),
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or need("hidden_size") // heads,
        intermediate_size=need("intermediate_size"),
        vocab_size=need("vocab_size"),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope=_rope(raw, where),
        max_position=need("max_position_embeddings"),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=variant.qkv_bias,
        qk_norm=variant.qk_norm,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
    )


def _rope(raw: Mapping[str, Any], where: str) -> RopeSpec:
    """transformers 5 writes ``rope_parameters``, earlier versions rope_theta and rope_scaling."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta", 10000.0)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            f"--model: {where} asks for rope type {kind!r}; kvserve has default, linear, llama3"
        )
    return RopeSpec(float(theta), kind, parameters)
