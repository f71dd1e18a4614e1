"""Which form of a decoder runs: our own layers, or transformers' (``--model-impl``)."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch

from kvserve.config import ModelConfig
from kvserve.engine.messages import Row
from kvserve.engine.models.families import VARIANTS
from kvserve.engine.models.hub import read_config
from kvserve.engine.models.linear import Holding, select_product
from kvserve.engine.models.spec import ModelSpec, architecture_of, has_alibi, parse_spec
from kvserve.late import Late
from kvserve.log import ConfigError

_borrowed_spec = Late("engine.models.borrowed_spec:borrowed_spec")
_knows = Late("engine.models.borrowed_spec:knows")
_native_spec = Late("engine.models.delta_spec:native_spec")
_text_part = Late("engine.models.wrapper:text_part")
_WITH_STATES = ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM")
_LAYERS = {
    False: ("native", "kvserve's own; --model-impl transformers runs transformers'"),
    True: ("transformers", "its modules on kvserve's cache; slower than native ones"),
}
"""What runs them, by ``ModelSpec.borrowed``."""


def choose_spec(directory: Path, config: ModelConfig, device: str = "cpu") -> ModelSpec:
    """The spec of the form that ``config`` asks for, by default ours if ``device`` has one.

    ``ConfigError`` says what keeps the model from running.
    """
    has_weights = config.load_format != "dummy"
    raw, where = read_config(directory, config.hf_overrides, weights=has_weights)
    architecture, wrapper, text = architecture_of(raw), "", None
    known = VARIANTS if "text_config" in raw else (*VARIANTS, *_WITH_STATES)
    if architecture not in known and directory.is_dir():
        text = _text_part(raw, where, architecture)
    if text is not None:
        whole = "architectures", "model_type", "text_config", "vision_config"
        of_text = {n: value for n, value in config.hf_overrides.items() if n not in whole}
        raw, wrapper = {**text, **of_text}, architecture
        architecture = architecture_of(raw)
    if architecture in _WITH_STATES and config.model_impl != "transformers":
        native = cast("ModelSpec | None", _native_spec(raw, where, config, device))
        if native is not None:
            return native
    ours = architecture in VARIANTS or has_alibi(raw) or not _knows(architecture)
    if config.model_impl == "native" or (config.model_impl == "auto" and ours):
        return parse_spec(raw, where)
    in_gguf = raw.get("stored_as") and architecture in (*VARIANTS, "Qwen3NextForCausalLM")
    if raw.get("quantization_config") or in_gguf:
        raise ConfigError(
            f"--model: {architecture} runs on transformers' modules here, and kvserve reads no "
            "quantised weights and no GGUF into them"
        )
    return cast(ModelSpec, _borrowed_spec(directory, config.hf_overrides, architecture, wrapper))


def model_rows(
    config: ModelConfig, spec: ModelSpec, dtype: torch.dtype, device: str, holding: Holding
) -> list[Row]:
    """The start-up table's rows on the model; ``holding``: which weights are levels."""
    name, forms = str(dtype)[6:], {hold.form for hold in holding.matrices.values()}
    held = " and ".join(sorted({form.name for form in forms}))
    state = f"{held}, else {name}" if held else name
    quantized, weights = spec.quantization, (state, "--dtype")
    source = spec.stored_as or (quantized and quantized.method)
    if config.load_format == "dummy":
        weights = f"random, {state}", "--load-format dummy"
    elif source:
        rounded = any(form.rounds for form in forms)
        reasons = ["as stored"] if forms else []
        if device == "cuda" and not all(form.e4m3 and form.rounds for form in forms):
            reasons.append("steps of many tokens take longer than with numbers")
        if rounded:
            reasons.append("x is rounded to 8 bits too, at a scale per token")
        for why, count in holding.widened.items():
            reasons.append(f"{count} matrices are widened: {why}")
        if not reasons:
            reasons.append("widened when read: its accuracy, not its size")
        if quantized is not None:
            left_out = ["the quantisation of activations"] * (quantized.activations and not rounded)
            left_out += ["the quantised KV cache"] * quantized.kv_cache
            if left_out:
                reasons.append(f"not applied: {' and '.join(left_out)}")
        weights = f"{state}, from {source}", "; ".join(reasons)
    return [
        ("model", config.model, f"{spec.architecture}, {name} on {device}"),
        ("layers", *_LAYERS[spec.borrowed]),
        ("weights", *weights),
    ]


def linear_layers_row(spec: ModelSpec, dtype: torch.dtype, device: str) -> Row:
    """Which matrix product the linear layers use."""
    if spec.borrowed:
        return "linear layers", "torch", "transformers' modules keep their own matrices"
    return "linear layers", *select_product(dtype, device)
