"""What config.json says of a decoder that runs on transformers' own modules (``borrowed.py``), and
what keeps it from running here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvserve.engine.models.hub import read_config
from kvserve.engine.models.spec import ModelSpec, RopeSpec
from kvserve.late import Late
from kvserve.log import ConfigError

_recurrent = Late("engine.models.recurrent:Recurrent")
_states_of = Late("engine.models.recurrent:states_of")
_FULL = {"full_attention", "attention"}
_WINDOWED = {"sliding_attention", "chunked_attention"}
_STATES = {"linear_attention", "conv", "moe", "mlp"}
"""Layers without keys and values, of models that keep states. Those that have both are hybrid."""
_KEEP_STATES = {
    *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "lfm3"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
}
"""Models (``model_type``) whose states were compared with transformers' own."""
_SINKS = {"GptOssForCausalLM"}
"""Architectures whose attention passes sinks (``s_aux``)."""


def borrowed_spec(
    directory: Path, overrides: Mapping[str, Any], architecture: str, wrapper: str = ""
) -> ModelSpec:
    """What config.json says of a decoder that transformers knows; ``ConfigError`` names what keeps
    it from running here."""
    try:
        config = text_config(directory, overrides)
        return replace(_spec(config, architecture), wrapper=wrapper)
    except ConfigError:
        raise
    except Exception as error:  # a config that no one here has thought of
        raise refused(architecture, f"its config.json is not understood ({error})") from None


def _spec(config: Any, architecture: str) -> ModelSpec:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    kept = config.model_type in _KEEP_STATES
    # Those that keep states say that they cannot, and do: ``try_out`` looks.
    if causal is None or not (causal._supports_attention_backend or kept):
        raise refused(architecture, "transformers cannot hand its attention to another program")
    _check_layers(config, architecture)
    attending = attending_layers(config)
    if not attending:
        raise refused(architecture, "none of its layers has keys and values")
    window, windowed = _windows(config, attending)
    (kv_heads, head_dim), of_windows = _heads(config, attending, windowed, architecture)
    heads, latent = int(config.num_attention_heads), getattr(config, "kv_lora_rank", None)
    if latent:  # held as every head reads them: keys of two parts, values filled up
        kv_heads, head_dim = heads, int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    eos = getattr(config, "eos_token_id", None)
    dtype = getattr(config, "dtype", None)
    context = getattr(config, "max_position_embeddings", None)
    if context is None:
        raise refused(architecture, "it states no longest context (max_position_embeddings)")
    kinds = set(getattr(config, "layer_types", None) or ())
    if "chunked_attention" in kinds:  # up to a chunk's length it is full attention
        context = min(context, config.attention_chunk_size)
    states = _states_of(config, architecture) if kept else ()
    return ModelSpec(
        architecture=architecture,
        num_layers=len(attending),
        hidden_size=config.hidden_size,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=int(max(width) if isinstance(width, list) else width),
        vocab_size=config.vocab_size,
        rms_norm_eps=1e-6,
        rope=RopeSpec(1.0, "transformers", context),
        max_position=context,
        window=window,
        windowed=windowed,
        tied_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        dtype="float32" if dtype is None else str(dtype).removeprefix("torch."),
        sinks=architecture in _SINKS,
        soft_cap=float(getattr(config, "attn_logit_softcapping", None) or 0.0),
        window_heads=of_windows,
        sharing=len(places_of(config)) - len(attending),
        borrowed=True,
        stored_as=getattr(config, "stored_as", ""),
        states=states,
        decoder=_recurrent if states else None,
    )


def knows(architecture: str) -> bool:
    """Whether transformers has a decoder of this name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return any(
        architecture in ((name,) if isinstance(name, str) else name) for name in NAMES.values()
    )


def text_config(directory: Path, overrides: Mapping[str, Any]) -> Any:
    """The decoder's; in a wrapper it has what is stated there for all parts."""
    from transformers import AutoConfig

    try:
        if directory.is_file():
            whole = AutoConfig.for_model(**read_config(directory, overrides)[0])
        else:
            whole = AutoConfig.from_pretrained(directory, local_files_only=True, **overrides)
    except Exception as error:  # what the config's class raises
        raise ConfigError(f"--model: transformers cannot read config.json: {error}") from None
    text = whole.get_text_config(decoder=True)
    if text is not whole:
        for name in ("eos_token_id", "dtype", "tie_word_embeddings"):
            if getattr(whole, name, None) is not None:
                setattr(text, name, getattr(whole, name))
        for name, value in overrides.items():
            if hasattr(text, name):
                setattr(text, name, value)
    return text


def _check_layers(config: Any, architecture: str) -> None:
    fields = "head_dim", "num_attention_heads", "num_key_value_heads"
    different = [name for name in fields if isinstance(config.to_dict().get(name), list)]
    by_layer = getattr(config, "per_layer_attributes", None) or set()
    if different := different or sorted(by_layer - {"head_dim", "num_key_value_heads"}):
        raise refused(architecture, f"its layers differ in {', '.join(different)}")
    kinds, known = getattr(config, "layer_types", None) or (), _FULL | _WINDOWED
    if config.model_type in _KEEP_STATES:
        known = known | _STATES | {"hybrid"}
    for index, kind in enumerate(kinds):
        if kind not in known:
            raise refused(architecture, f"layer {index} is {kind}, not keys and values alone")
    if getattr(config, "is_encoder_decoder", False):
        raise refused(architecture, "it has an encoder")
    if getattr(config, "kv_lora_rank", None) and config.model_type not in _KEEP_STATES:
        raise refused(architecture, "its layers have latent attention (MLA)")
    if getattr(config, "attention_logit_cap", None):
        raise refused(architecture, "its attention caps logits (attention_logit_cap)")
    rope = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in parts:
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise refused(
                architecture, f"RoPE of type {part['rope_type']} depends on a batch's lengths"
            )


def attending_layers(config: Any) -> list[int]:
    """transformers' numbers of the layers that have keys and values: ours count these alone."""
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(kinds)
    both = enumerate(zip(kinds, modes, strict=True))
    return [layer for layer, (kind, mode) in both if kind not in _STATES and mode != "reuse"]


def places_of(config: Any) -> dict[int, int]:
    """By transformers' number of each layer that attends, ours of the one whose keys and values it
    reads: its own, or the last one of its kind that has any."""
    attending = attending_layers(config)
    places = {layer: place for place, layer in enumerate(attending)}
    for layer, mode in enumerate(getattr(config, "kv_sharing_modes", None) or ()):
        if mode == "reuse":
            kind = config.layer_types[layer]
            places[layer] = places[max(n for n in attending if config.layer_types[n] == kind)]
    return places


def _heads(
    config: Any, attending: list[int], windowed: frozenset[int], architecture: str
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    """KV heads and their size, and those of layers with windows where these are others."""

    def of(config: Any) -> tuple[int, int]:
        heads = int(config.num_attention_heads)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        return int(getattr(config, "num_key_value_heads", None) or heads), int(head_dim)

    if not getattr(config, "per_layer_attributes", None):
        return of(config), None
    kinds: tuple[set[tuple[int, int]], ...] = (set(), set())
    for place, layer in enumerate(attending):
        kinds[place in windowed].add(of(config.per_layer_config[layer]))
    if any(len(found) > 1 for found in kinds):
        raise refused(architecture, "its layers of one kind differ in their heads")
    (full,), (newest,) = kinds[0] or kinds[1], kinds[1] or kinds[0]
    return full, None if newest == full else newest


def _windows(config: Any, attending: list[int]) -> tuple[int | None, frozenset[int]]:
    """The window of the sliding layers and which these are, if it has any."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None, frozenset()
    kinds = [kinds[layer] if kinds else "sliding_attention" for layer in attending]
    windowed = frozenset(n for n, kind in enumerate(kinds) if kind == "sliding_attention")
    return (int(window), windowed) if windowed else (None, windowed)


def refused(architecture: str, why: str) -> ConfigError:
    return ConfigError(f"--model: kvserve cannot run {architecture}: {why}")
