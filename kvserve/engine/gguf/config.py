"""A GGUF file's metadata as the config.json of transformers, and its tensors' names there.

What llama.cpp's converter drops is put back as llama.cpp does it; what changes a model's answers
and is not known here is refused by name, before weights are read.
"""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from kvserve.engine.gguf.reader import GgufFile, numbers

_ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
_FIELDS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_SCALING = {
    "type": "rope_type",
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_FURTHER = {"vocab_size", "expert_count", "expert_used_count", "tensor_data_layout"}
_FURTHER |= {"attention.value_length", "attention.sliding_window_pattern", "rope.dimension_count"}
_FURTHER |= {"rope.freq_base", "rope.freq_base_swa", "rope.scaling.finetuned"}
_KNOWN = {*_FIELDS, *_FURTHER, *(f"rope.scaling.{name}" for name in _SCALING)}
_NEUTRAL: dict[str, tuple[float, ...]] = {
    "attention.causal": (True,),
    **dict.fromkeys(("embedding_scale", "logit_scale", "residual_scale"), (0.0, 1.0)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1.0,)),
    **dict.fromkeys(
        (
            *("attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale"),
            *("attention.shared_kv_layers", "expert_group_count", "expert_group_used_count"),
            *("expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count"),
            *("nextn_predict_layers", "pooling_type", "rope.scaling.yarn_log_multiplier"),
            *("swin_norm", "use_parallel_residual"),
        ),
        (0.0,),
    ),
}
"""Further keys of llama.cpp, and the values with which they change nothing."""

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING["penalty_repeat"] = "repetition_penalty"

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    **_OF_A_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PHI3 = {**_OF_A_LAYER, "ffn_up": "mlp.gate_up_proj"}
_NAMES = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI3}
_ROPE_FACTORS = "rope_freqs.weight"
_WIDE_GEMMAS = (("gemma2", 46), ("gemma3", 62))
"""The 27B models, which llama.cpp knows by their layers, divide queries by the root of hidden size
/ heads; others by the root of a head's size."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""What ends a turn, in llama.cpp too, although a file names another token as the end."""
CONTROL = 3
"""The type of tokens that are no text."""


def family_of(file: GgufFile) -> str:
    """What llama.cpp calls the architecture; ``ConfigError`` if it is not read."""
    name = file.value("general.architecture", str)
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise file.error(f"is of architecture {name!r}; of GGUF files kvserve reads {known}")
    return str(name)


def config_of(file: GgufFile) -> dict[str, Any]:
    """The fields of config.json; ``ConfigError`` names what of the file is not read."""
    name = family_of(file)
    prefix = f"{name}."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    changing = (k for k, v in own.items() if np.ndim(v) or v not in _NEUTRAL.get(k, ()))
    if unknown := sorted(set(changing) - _KNOWN):
        raise file.error(f"sets {prefix}{unknown[0]} to {own[unknown[0]]}, which is not read")
    if file.value("split.count", int, 1) > 1:
        raise file.error("is one of several parts; llama-gguf-split --merge makes one of them")
    if count := file.value(f"{prefix}expert_count", int, 0):
        raise file.error(f"has {count} experts, which are read of safetensors only")
    if unread := sorted(file.tensors.keys() - {*tensor_names(file).values(), _ROPE_FACTORS}):
        raise file.error(f"has a tensor {unread[0]} ({len(unread)} such) that is not read")
    if embedding is None:
        raise file.error("has no tensor token_embd.weight; is it a language model?")
    architecture, model_type = _ARCHITECTURES[name]
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    matrices = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    config = {ours: own[theirs] for theirs, ours in _FIELDS.items() if theirs in own}
    config |= {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": _ends(file),
        "dtype": {"F32": "float32", "F16": "float16"}.get("".join(matrices), "bfloat16"),
        "stored_as": f"GGUF ({', '.join(sorted(kinds))})",
    }
    if not file.value(f"{prefix}attention.sliding_window", int):
        config.pop("sliding_window", None)  # Phi-4 states 0
    pattern = own.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        config["layer_types"] = [f"{'sliding' if it else 'full'}_attention" for it in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads:  # others are refused later
        size = file.value(f"{prefix}attention.key_length", int) or hidden // heads
        if file.value(f"{prefix}attention.value_length", int, size) != size:
            raise file.error("has keys and values of unequal sizes, which kvserve does not run")
        wide = (name, config.get("num_hidden_layers")) in _WIDE_GEMMAS
        rotated = file.value(f"{prefix}rope.dimension_count", int, size)
        config |= {"head_dim": size, "partial_rotary_factor": rotated / size}
        config["query_pre_attn_scalar"] = hidden // heads if wide else size
    rope = _rope(file, own)
    if name == "gemma3":
        local = {"rope_theta": own.get("rope.freq_base_swa", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local}
    return {**config, "rope_parameters": rope}


def sampling_of(file: GgufFile) -> dict[str, Any]:
    """The fields of generation_config.json that the file suggests."""
    given = {ours: file.value(f"general.sampling.{n}", Real) for n, ours in _SAMPLING.items()}
    return {name: round(value, 6) for name, value in given.items() if value is not None}


def tensor_names(file: GgufFile) -> dict[str, str]:
    """The file's names of its tensors by those of transformers, for what is a decoder's."""
    of_a_layer, names = _NAMES.get(family_of(file), _OF_A_LAYER), {}
    for stored in file.tensors:
        base, _, kind = stored.rpartition(".")
        if base.startswith("blk."):
            layer, _, part = base[4:].partition(".")
            base, found = f"model.layers.{layer}.", of_a_layer.get(part)
        else:
            base, found = "", _WHOLE.get(base)
        if found is not None and kind in ("weight", "bias"):
            names[f"{base}{found}.{kind}"] = stored
    return names


def _rope(file: GgufFile, own: dict[str, Any]) -> dict[str, Any]:
    """``rope_parameters``, from the metadata and from Llama 3's factors of frequencies."""
    scaling = {ours: own.get(f"rope.scaling.{name}") for name, ours in _SCALING.items()}
    kind = scaling["rope_type"]
    rope = scaling if kind not in (None, "none") else {}
    theta: float = file.value(f"{family_of(file)}.rope.freq_base", Real, 10_000.0)
    rope["rope_theta"] = theta
    if _ROPE_FACTORS not in file.tensors:
        return rope
    stored = file.blocks(_ROPE_FACTORS, slice(None))
    factors = numbers(stored, file.tensors[_ROPE_FACTORS].kind).flatten()
    llama3 = {"factor": float(factors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 8192
    steps = np.arange(len(factors)) / len(factors)
    turns = 8192 / (2 * np.pi * theta**steps)
    smooth = ((turns - 1.0) / 3.0).clip(0.0, 1.0)
    expected = 1 / ((1 - smooth) / llama3["factor"] + smooth)
    if rope.get("rope_type") or not np.allclose(factors, expected, rtol=1e-3):
        raise file.error(f"has {_ROPE_FACTORS} that are not Llama 3's, which are not read")
    return {**rope, **llama3, "rope_type": "llama3"}


def _ends(file: GgufFile) -> list[int]:
    """The tokens that end a sequence."""
    names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = {file.value(name, int) for name in names}
    types = file.value("tokenizer.ggml.token_type", np.ndarray, ())
    tokens = file.strings("tokenizer.ggml.tokens")
    typed = enumerate(zip(tokens, types, strict=False))
    known = {n for n, (text, kind) in typed if kind == CONTROL and text in _ENDS}
    return sorted(known.union(ids) - {None})
