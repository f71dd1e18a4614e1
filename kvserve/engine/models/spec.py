"""What kvserve needs to know of a checkpoint's config.json, and what it refuses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvserve.engine.models.hub import read_json
from kvserve.engine.models.quantization import Quantization, parse_quantization
from kvserve.log import ConfigError


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base, type, the context before scaling, and the type's own numbers."""

    theta: float
    kind: str
    original: int
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder of the Llama family as numbers and flags.

    ``max_position`` is the longest context, scaled RoPE included. ``window`` is that of
    sliding-window layers, ``None`` if every layer has full attention.
    """

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
    window: int | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None

    @property
    def policy_refusal(self) -> str | None:
        """Why no policy but ``none`` may serve this model, if so."""
        if self.window is None:
            return None
        return (
            f"the model has sliding-window layers ({self.window} tokens): they forget by position, "
            "and a compacted cache no longer says which entries those are"
        )

    def part(self, ranks: int) -> ModelSpec:
        """What each of ``ranks`` ranks computes: its heads and its part of the MLP.

        ``ConfigError`` if they cannot be divided equally.
        """
        shared = {
            "KV heads (they are not copied to several ranks)": self.num_kv_heads,
            "columns of the MLP (intermediate_size)": self.intermediate_size,
        }
        for what, count in shared.items():
            if count % ranks:
                raise ConfigError(
                    f"--tensor-parallel-size: {ranks} ranks cannot have equally many of the "
                    f"model's {count} {what}"
                )
        return replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
        )

    def num_shareable(self, num_prompt: int) -> int:
        """Leading tokens that other sequences may share: those rotated by position alone.

        Dynamic NTK rotates a prompt beyond the original context by its length.
        """
        if self.rope.kind != "dynamic":
            return self.max_position
        return self.rope.original if num_prompt <= self.rope.original else 0


@dataclass(frozen=True)
class _Variant:
    qkv_bias: bool = False
    qk_norm: bool = False


VARIANTS = {
    "InternLM2ForCausalLM": _Variant(),
    "LlamaForCausalLM": _Variant(),
    "MistralForCausalLM": _Variant(),
    "Qwen2ForCausalLM": _Variant(qkv_bias=True),
    "Qwen3ForCausalLM": _Variant(qk_norm=True),
}
_ALIBI = ("BloomForCausalLM", "MPTForCausalLM", "MptForCausalLM")
# Numbers that a RoPE type needs, and those it may have.
_ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("factor",),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}


def read_spec(directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Parse ``config.json``; ``ConfigError`` names the field that is missing or unknown.

    ``overrides`` replace fields of the file (``--hf-overrides``).
    """
    path = directory / "config.json"
    if not path.exists():
        raise ConfigError(f"--model: no config.json in {directory}; is it a checkpoint?")
    return parse_spec({**read_json(path), **(overrides or {})}, str(path))


def parse_spec(raw: Mapping[str, Any], where: str) -> ModelSpec:
    """Build a spec from the content of a config.json; ``where`` is named in errors."""
    config = _Fields(raw, where)
    architecture = (raw.get("architectures") or ["(none)"])[0]
    _refuse_unbuilt(config, architecture)
    variant = VARIANTS[architecture]
    layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    kv_heads, hidden = config.count("num_key_value_heads", heads), config.count("hidden_size")
    if heads % kv_heads:
        raise config.error(f"has {heads} attention heads for {kv_heads} KV heads, no multiple")
    head_dim = config.count("head_dim", hidden // heads)
    if head_dim % 2:
        raise config.error(f"has heads of {head_dim} dimensions; RoPE needs an even number")
    eos, quantized = raw.get("eos_token_id"), config.part("quantization_config")
    rope = _rope(config)
    return ModelSpec(
        architecture=architecture,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config.count("intermediate_size"),
        vocab_size=config.count("vocab_size"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=_max_position(config, rope),
        window=_window(config, architecture, layers),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=variant.qkv_bias,
        qk_norm=variant.qk_norm,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        quantization=parse_quantization(quantized, where) if quantized else None,
    )


@dataclass(frozen=True)
class _Fields:
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
        """A positive integer."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.absent(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"sets {name} to {value!r}, which is no positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float):
            raise self.error(f"sets {name} to {value!r}, which is no number")
        return float(value)

    def part(self, name: str) -> dict[str, Any]:
        """A JSON object in the object, empty where it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(f"sets {name} to {value!r}, which is no JSON object")
        return dict(value)


def _refuse_unbuilt(config: _Fields, architecture: str) -> None:
    """``ConfigError`` for settings that change the model's answers and are not built."""
    raw = config.raw
    if architecture in _ALIBI or raw.get("alibi"):
        raise config.error(
            f"names {architecture} with ALiBi: its attention depends on the distance between "
            "tokens, which a compressed cache does not keep"
        )
    if architecture not in VARIANTS:
        raise config.error(
            f"names architecture {architecture}; kvserve runs {', '.join(sorted(VARIANTS))}"
        )
    for name in ("attention_bias", "mlp_bias", "bias"):
        if raw.get(name):
            raise config.error(f"sets {name}, which kvserve does not run")
    if raw.get("hidden_act", "silu") != "silu":
        raise config.error(f"sets hidden_act to {raw['hidden_act']!r}; kvserve runs silu")


def _window(config: _Fields, architecture: str, layers: int) -> int | None:
    """As transformers decides it: Mistral by ``sliding_window``, Qwen by layer, others never."""
    if config.raw.get("sliding_window", "absent") is None:
        return None
    if architecture == "MistralForCausalLM":
        sliding = True
    elif architecture.startswith("Qwen"):
        types = config.raw.get("layer_types")
        full = config.count("max_window_layers", 28) >= layers
        sliding = bool(config.raw.get("use_sliding_window"))
        sliding &= not full if types is None else "sliding_attention" in types
    else:
        sliding = False
    return config.count("sliding_window", 4096) if sliding else None


def _rope(config: _Fields) -> RopeSpec:
    """transformers 5 writes ``rope_parameters``, earlier versions rope_theta and rope_scaling."""
    parameters, scaling = config.part("rope_parameters"), config.part("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise config.error(
            "has both rope_parameters and rope_scaling; set the other one to null "
            "(--hf-overrides does it too)"
        )
    rope = _Fields(parameters or scaling, f"{config.where} (RoPE)")
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind not in _ROPE_TYPES or any(isinstance(v, dict) for v in rope.raw.values()):
        raise config.error(f"asks for RoPE type {kind!r}; kvserve has {', '.join(_ROPE_TYPES)}")
    for fields in (rope, config):
        if fields.number("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error("sets partial_rotary_factor, which kvserve does not run")
    needed, optional = _ROPE_TYPES[kind]
    missing = [name for name in needed if rope.raw.get(name) is None]
    if missing:
        raise rope.absent(missing[0], f", which type {kind} needs")
    given = [name for name in (*needed, *optional) if rope.raw.get(name) is not None]
    original = config.count("max_position_embeddings")
    if kind in ("llama3", "yarn"):
        original = rope.count("original_max_position_embeddings", original)
        original = config.count("original_max_position_embeddings", original)
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    return RopeSpec(theta, kind, original, {name: rope.number(name, 0.0) for name in given})


def _max_position(config: _Fields, rope: RopeSpec) -> int:
    """The longest context with scaled RoPE; for llama3 it is max_position_embeddings itself."""
    stated = config.count("max_position_embeddings")
    if rope.kind in ("default", "llama3"):
        return stated
    return max(stated, int(rope.original * rope.parameters["factor"]))
