"""The decoder in a model that also sees or hears (``...ForConditionalGeneration``): text alone is
served, by the decoder's layers, and the other tensors are not read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvserve.engine.models.checkpoint import SafetensorsFiles
from kvserve.engine.models.families import VARIANTS
from kvserve.log import ConfigError, logger

_PLAIN_WITH_TEXT = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), "Qwen2ForCausalLM"),
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""Text parts that differ from the decoder in where they put images: of text, the three positions by
which they rotate are one."""
_SEE_ALL_OF_A_PROMPT = ("PaliGemmaForConditionalGeneration",)
_GUESS_FOR_OTHERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_PREFIX = re.compile(r"(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(lm_head\.)?")
_OWN = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")


def text_part(raw: Mapping[str, Any], where: str, architecture: str) -> dict[str, Any] | None:
    """The config.json of the decoder in a wrapper; ``None`` if the model is no wrapper.

    ``architecture`` is what ``raw`` names. Raises ``ConfigError`` for a config that is damaged, or
    of no decoder.
    """
    if architecture in VARIANTS:
        return None
    if architecture in _GUESS_FOR_OTHERS:
        raise ConfigError(
            f"--model: kvserve cannot run {architecture}: it guesses tokens of another model, and "
            "reads that one's keys and values"
        )
    # Not for decoders of our own: loading transformers takes as long as loading torch.
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    kind = str(raw.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return None
    try:
        whole = CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(raw), object_hook=_number))
        text = whole.get_text_config(decoder=True)
        given = text.to_dict()
    except Exception as error:  # what the config's class raises
        raise ConfigError(f"--model: transformers cannot read {where}: {error}") from None
    if text is whole:
        return None
    named = _PLAIN_WITH_TEXT.get(text.model_type) or NAMES.get(text.model_type)
    if named is None or architecture in _SEE_ALL_OF_A_PROMPT:
        return None
    shared = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")
    return {
        **given,
        **{name: raw[name] for name in shared if raw.get(name) is not None},
        "tie_word_embeddings": whole.tie_word_embeddings,
        "architectures": [named if isinstance(named, str) else named[0]],
        "wrapper": architecture,
    }


def _number(part: dict[str, Any]) -> Any:
    """What transformers writes for a number that JSON has no word for."""
    return float(part["__float__"]) if part.keys() == {"__float__"} else part


def open_text_part(path: Path, wrapper: str) -> SafetensorsFiles:
    """A checkpoint of a wrapper as one of its decoder, under the decoder's names."""
    checkpoint = SafetensorsFiles(path, _own_name)
    others = Counter(
        name.removeprefix("model.").partition(".")[0] for name in sorted(checkpoint.left_out)
    )
    if others:
        logger.info(
            "%s: the text part alone is served; %d tensors are not read (%s)",
            *(wrapper, others.total(), ", ".join(others)),
        )
    return checkpoint


def _own_name(name: str) -> str | None:
    """The decoder's name of a wrapper's tensor; ``None`` if it is no part of the decoder."""
    found = _PREFIX.match(name)
    if found is None:
        return name if name.startswith(_OWN) else None
    return (found[1] or "model.") + name[found.end() :]
