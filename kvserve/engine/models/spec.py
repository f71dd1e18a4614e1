"""What kvserve needs to know of a checkpoint's config.json, and what it refuses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kvserve.engine.models.families import (
    UNDIVIDED,
    VARIANTS,
    ExpertSpec,
    Fields,
    Flags,
    Variant,
    experts_of,
    layers_without_rope,
    scales_of,
    windows_of,
)
from kvserve.late import Late
from kvserve.log import ConfigError, shown
from kvserve.scheduler.layout import LayerKinds, LayerState

if TYPE_CHECKING:
    from kvserve.engine.models.quantization import Quantization

_parse_quantization = Late("engine.models.quantization:parse_quantization")


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding: base, type, the context before scaling, and the type's own numbers."""

    theta: float
    kind: str
    original: int
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Flags):
    """A decoder of the Llama family as numbers and flags.

    ``max_position`` is the longest context, scaled RoPE included. Tokens see the newest ``window``
    in the layers ``windowed``, and all in the others. ``soft_cap`` caps attention's logits, unless
    it is 0. Layers in ``without_rope`` rotate nothing; those with windows rotate by
    ``rope_of_windows``, if there is one. The scales of Granite and Gemma multiply embeddings,
    queries, and what a layer adds; logits are divided, and capped at ``logits_cap`` unless it is 0.
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
    windowed: frozenset[int]
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: Quantization | None = None
    experts: ExpertSpec | None = None
    rope_of_windows: RopeSpec | None = None
    logits_cap: float = 0.0
    without_rope: frozenset[int] = frozenset()
    embedding_scale: float = 1.0
    query_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    soft_cap: float = 0.0
    stored_as: str = ""
    """How a file of GGUF has the weights."""
    wrapper: str = ""
    """The model that it is the text part of (``wrapper.py``)."""
    window_heads: tuple[int, int] | None = None
    """KV heads of layers with windows, and their size, if others have other ones."""
    sharing: int = 0
    """Further layers, that read the keys and values of these and have none."""
    borrowed: bool = False
    """Whether its layers are transformers' own modules (``borrowed.py``)."""
    states: tuple[LayerState, ...] = ()
    """What layers keep beside entries. ``num_layers`` counts the others."""
    decoder: Any = None
    """The class of a model whose layers keep states; ``None``: ``Transformer``, or ``Borrowed``."""
    delta: Any = None
    """Of our own layers with states: ``DeltaSpec``. Attention has gates then."""

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The experts of one layer; ``None`` if it has an MLP for all tokens."""
        experts = self.experts
        return None if experts is None or layer in experts.dense else experts

    @cached_property
    def layers(self) -> LayerKinds:
        """Which layers see all tokens."""
        return LayerKinds(self.num_layers, self.windowed)

    @property
    def policy_refusal(self) -> str | None:
        """Why no policy but ``none`` may serve this model, if so."""
        if self.layers.full:
            return None
        return (
            f"every layer of the model has a sliding window ({self.window} tokens), so its cache "
            "is as small as that already"
        )

    def part(self, ranks: int) -> ModelSpec:
        """What each of ``ranks`` ranks computes: its heads and its part of the MLP. ``ConfigError``
        if they cannot be divided equally."""
        if ranks > 1 and self.borrowed:
            raise ConfigError(
                f"--tensor-parallel-size: {self.architecture} runs on transformers' modules, which "
                "one rank has to hold"
            )
        if ranks > 1 and (why := UNDIVIDED.get(self.architecture)):
            raise ConfigError(
                f"--tensor-parallel-size: {self.architecture} {why}, so one rank has to hold them"
            )
        experts = self.experts
        shared = {
            "KV heads (they are not copied to several ranks)": self.num_kv_heads,
            "columns of the MLP (intermediate_size)": self.intermediate_size,
        }
        if experts is not None:
            shared["columns of an expert"] = experts.intermediate_size
        if self.delta is not None:
            shared["key heads of layers with states"] = self.delta.key_heads
        for what, count in shared.items():
            if count % ranks:
                raise ConfigError(
                    f"--tensor-parallel-size: {ranks} ranks cannot have equally many of the "
                    f"model's {count} {what}"
                )
        part = replace(
            self,
            num_heads=self.num_heads // ranks,
            num_kv_heads=self.num_kv_heads // ranks,
            intermediate_size=self.intermediate_size // ranks,
            experts=experts
            and replace(experts, intermediate_size=experts.intermediate_size // ranks),
        )
        return part if self.delta is None else self.delta.divided(part, ranks)

    def num_shareable(self, num_prompt: int) -> int:
        """Leading tokens that other sequences may share: those rotated by position alone.

        Dynamic NTK rotates a prompt beyond the original context by its length.
        """
        if self.rope.kind != "dynamic":
            return self.max_position
        return self.rope.original if num_prompt <= self.rope.original else 0


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


def parse_spec(raw: Mapping[str, Any], where: str) -> ModelSpec:
    """Build a spec from the content of a config.json. ``ConfigError`` names the field that is
    missing or unknown, and ``where`` it was read."""
    config, architecture = Fields(raw, where), architecture_of(raw)
    _refuse_unbuilt(config, architecture)
    variant = VARIANTS[architecture]
    layers, heads = config.count("num_hidden_layers"), config.count("num_attention_heads")
    kv_heads, hidden = config.count("num_key_value_heads", heads), config.count("hidden_size")
    if heads % kv_heads:
        raise config.error(f"has {heads} attention heads for {kv_heads} KV heads, no multiple")
    head_dim = config.count("head_dim", variant.head_dim or hidden // heads)
    if head_dim % 2:
        raise config.error(f"has heads of {head_dim} dimensions; RoPE needs an even number")
    eos, quantized = raw.get("eos_token_id"), config.part("quantization_config")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int for token in eos):
        raise config.error(f"sets eos_token_id to {shown(eos)}, which are no token ids")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if not isinstance(dtype, str):
        raise config.error(f"sets dtype to {shown(dtype)}, which names none")
    rope, rope_of_windows = _ropes(config, variant)
    max_position = config.count("max_position_embeddings")
    if rope.kind not in ("default", "llama3") and not variant.states_longest:  # before scaling
        max_position = max(max_position, int(rope.original * rope.parameters["factor"]))
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
        max_position=max_position,
        **{flag.name: getattr(variant, flag.name) for flag in fields(Flags)},
        **windows_of(config, architecture, layers),
        tied_embeddings=bool(raw.get("tie_word_embeddings", variant.tied)),
        eos_token_ids=tuple(eos),
        dtype=dtype,
        quantization=_parse_quantization(quantized, where) if quantized else None,
        experts=experts_of(config, architecture, layers),
        rope_of_windows=rope_of_windows,
        without_rope=layers_without_rope(config, architecture, layers),
        stored_as=raw.get("stored_as", ""),
        wrapper=raw.get("wrapper", ""),
        **scales_of(config, architecture, head_dim),
    )


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The one that a config.json names, or else the decoder of its ``model_type``."""
    named = raw.get("architectures")
    if isinstance(named, list) and named:
        return str(named[0])
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    known = {**NAMES, "internlm2": "InternLM2ForCausalLM"}
    found = known.get(str(raw.get("model_type")), "(none)")
    return found if isinstance(found, str) else found[0]


def has_alibi(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json's attention depends on the distance between tokens."""
    return architecture_of(raw) in _ALIBI or bool(raw.get("alibi"))


def _refuse_unbuilt(config: Fields, architecture: str) -> None:
    """``ConfigError`` for settings that change the model's answers and are not built."""
    raw = config.raw
    if has_alibi(raw):
        raise config.error(
            f"names {architecture} with ALiBi: its attention depends on the distance between "
            "tokens, which a compressed cache does not keep"
        )
    if architecture not in VARIANTS:
        text = config.part("text_config").get("model_type")
        inner = f" (its text part: {text})" if text else ""
        raise config.error(
            f"names architecture {architecture}{inner}; kvserve runs {', '.join(sorted(VARIANTS))}"
        )
    variant = VARIANTS[architecture]
    for name in ("attention_bias", "mlp_bias", "bias", "use_bidirectional_attention"):
        if raw.get(name) and not (name == "attention_bias" and variant.out_bias):
            raise config.error(f"sets {name}, which kvserve does not run")
    for name in ("hidden_act", "hidden_activation"):
        if (given := raw.get(name) or variant.activation) != variant.activation:
            raise config.error(f"sets {name} to {given!r}; kvserve runs {variant.activation}")


def _ropes(config: Fields, variant: Variant) -> tuple[RopeSpec, RopeSpec | None]:
    """That of layers that see all tokens, or of all; and that of layers with windows."""
    if variant.local_theta is None:
        return _rope(config, 10000.0), None
    parts = config.part("rope_parameters")
    if not parts.get("full_attention"):  # as it was written before transformers 5
        local = {"rope_theta": config.raw.get("rope_local_base_freq")}
        parts = {"full_attention": parts or config.part("rope_scaling"), "sliding_attention": local}
    raw = {**config.raw, "rope_scaling": None}
    full, local_part = (
        {**raw, "rope_parameters": parts[kind]} for kind in ("full_attention", "sliding_attention")
    )
    local_part["rope_theta"] = None
    return (
        _rope(Fields(full, config.where), 1_000_000.0),
        _rope(Fields(local_part, config.where), variant.local_theta),
    )


def _rope(config: Fields, theta: float) -> RopeSpec:
    """transformers 5 writes ``rope_parameters``, earlier versions rope_theta and rope_scaling."""
    parameters, scaling = config.part("rope_parameters"), config.part("rope_scaling")
    if parameters and scaling and parameters != scaling:
        raise config.error(
            "has both rope_parameters and rope_scaling; set the other one to null "
            "(--hf-overrides does it too)"
        )
    rope = Fields(parameters or scaling, f"{config.where} (RoPE)")
    kind = rope.raw.get("rope_type") or rope.raw.get("type") or "default"
    if kind not in _ROPE_TYPES or any(isinstance(v, dict) for v in rope.raw.values()):
        raise config.error(f"asks for RoPE type {kind!r}; kvserve has {', '.join(_ROPE_TYPES)}")
    for each in (rope, config):
        if each.number("partial_rotary_factor", 1.0) != 1.0:
            raise each.error("sets partial_rotary_factor, which kvserve does not run")
    needed, optional = _ROPE_TYPES[kind]
    missing = [name for name in needed if rope.raw.get(name) is None]
    if missing:
        raise rope.absent(missing[0], f", which type {kind} needs")
    given = [name for name in (*needed, *optional) if rope.raw.get(name) is not None]
    original = config.count("max_position_embeddings")
    if kind in ("llama3", "yarn"):
        original = rope.count("original_max_position_embeddings", original)
        original = config.count("original_max_position_embeddings", original)
    theta = rope.number("rope_theta", config.number("rope_theta", theta, above=0), above=0)
    numbers = {
        name: rope.number(name, 0.0, above=0) if name in needed else rope.number(name, 0.0)
        for name in given
    }
    return RopeSpec(theta, kind, original, numbers)
