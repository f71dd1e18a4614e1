"""Which form of a decoder runs: our own layers, or transformers' (``--model-impl``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kvserve.config import ModelConfig
from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.models.borrowed import borrowed_spec, knows, load_borrowed
from kvserve.engine.models.families import VARIANTS
from kvserve.engine.models.hub import read_config
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.spec import ModelSpec, architecture_of, has_alibi, parse_spec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.models.wrapper import text_part
from kvserve.log import ConfigError


def choose_spec(directory: Path, config: ModelConfig) -> ModelSpec:
    """The spec of the form that ``config`` asks for, by default ours if there is one.

    ``ConfigError`` says what keeps the model from running.
    """
    raw, where = read_config(directory, config.hf_overrides)
    architecture = architecture_of(raw)
    if config.model_impl != "transformers" and directory.is_dir():
        text = text_part(raw, where, architecture)
        if text is not None:
            return parse_spec({**text, **_of_text(config.hf_overrides)}, where)
    ours = architecture in VARIANTS or has_alibi(raw) or not knows(architecture)
    if config.model_impl == "native" or (config.model_impl == "auto" and ours):
        return parse_spec(raw, where)
    if raw.get("quantization_config") or raw.get("stored_as"):
        raise ConfigError(
            f"--model: {architecture} runs on transformers' modules here, and kvserve reads no "
            "quantised weights and no GGUF into them"
        )
    return borrowed_spec(directory, config.hf_overrides, architecture)


def _of_text(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a wrapper's config.json that may be meant for its text part."""
    whole = "architectures", "model_type", "text_config", "vision_config"
    return {name: value for name, value in overrides.items() if name not in whole}


def load(
    directory: Path,
    config: ModelConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    group: RankGroup = ALONE,
) -> Transformer:
    """The decoder of ``choose_spec`` with its weights (random for ``load_format="dummy"``)."""
    if not spec.borrowed:
        return load_model(directory, config, spec, dtype, device, group)
    random = config.load_format == "dummy"
    overrides = config.hf_overrides
    return load_borrowed(directory, overrides, spec, dtype, device, random=random)
