"""A GGUF file's metadata as the config.json of transformers, and its tensors' names there.

What llama.cpp's converter drops is put back as llama.cpp does it; what changes a model's answers
and is not known here is refused by name, before weights are read.
"""

from __future__ import annotations

from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np

from kvserve.engine.gguf.reader import GgufFile, numbers, read_gguf
from kvserve.log import shown

_ARCHITECTURES = {
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "lfm2": ("Lfm2ForCausalLM", "lfm2"),
    "lfm2moe": ("Lfm2MoeForCausalLM", "lfm2_moe"),
    "llama": ("LlamaForCausalLM", "llama"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3next": ("Qwen3NextForCausalLM", "qwen3_next"),
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
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_DELTA = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_SHARED = {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_CONV = {"attention.head_count": "num_attention_heads", "shortconv.l_cache": "conv_L_cache"}
_CONV["attention.layer_norm_rms_epsilon"] = "norm_eps"
_OWN_FIELDS = {
    "lfm2": _CONV,
    "lfm2moe": {**_CONV, **_EXPERTS, "leading_dense_block_count": "num_dense_layers"},
    "qwen35": _DELTA,
    "qwen35moe": {**_DELTA, **_EXPERTS, **_SHARED},
    "qwen3moe": _EXPERTS,
    "qwen3next": {**_DELTA, **_EXPERTS, **_SHARED},
}
"""Fields that only some families have."""
WITH_STATES = ("qwen35", "qwen35moe", "qwen3next")
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
_OF_STATES = {"nextn_predict_layers", "rope.dimension_sections", "ssm.inner_size"}
_KNOWN = {*_FIELDS, *_FURTHER, *(f"rope.scaling.{name}" for name in _SCALING)}
_NEUTRAL: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("attention.causal", "expert_weights_norm"), (True,)),
    **dict.fromkeys(("expert_gating_func", "expert_weights_scale"), (0.0, 1.0)),
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
_OWN_NEUTRAL = {"lfm2moe": {"expert_gating_func": (2.0,)}}  # sigmoid

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING["penalty_repeat"] = "repetition_penalty"

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_WHOLE["token_embd_norm"] = "model.embedding_norm"  # the last norm of LFM2
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
_MOE = {**_OF_A_LAYER, "ffn_gate_inp": "mlp.gate"}
_QWEN35 = {**_MOE, "post_attention_norm": "post_attention_layernorm"}
_QWEN35 |= {
    f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")
}
_QWEN35["ffn_gate_inp_shexp"] = "mlp.shared_expert_gate"
_OF_EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
_NAMES = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": _PHI3, "qwen3moe": _MOE}
_NAMES |= dict.fromkeys(WITH_STATES, _QWEN35)
_LFM2 = {
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
    **{f"attn_{name}_norm": f"self_attn.{name}_layernorm" for name in ("q", "k")},
    **{"attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "ffn_norm": "ffn_norm"},
    **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    "ffn_gate_inp": "feed_forward.gate",
}
_CONVOLVING = ("lfm2", "lfm2moe")
_NAMES |= dict.fromkeys(_CONVOLVING, _LFM2)
_OF_RULE = {
    "attn_gate.weight": ("linear_attn.in_proj_z.weight",),
    "attn_qkv.weight": ("linear_attn.in_proj_qkv.weight",),
    "ssm_a": ("linear_attn.A_log",),
    "ssm_alpha.weight": ("linear_attn.in_proj_a.weight",),
    "ssm_ba.weight": ("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight"),
    "ssm_beta.weight": ("linear_attn.in_proj_b.weight",),
    "ssm_conv1d.weight": ("linear_attn.conv1d.weight",),
    "ssm_dt.bias": ("linear_attn.dt_bias",),
    "ssm_in.weight": ("linear_attn.in_proj_qkv.weight", "linear_attn.in_proj_z.weight"),
    "ssm_norm.weight": ("linear_attn.norm.weight",),
    "ssm_out.weight": ("linear_attn.out_proj.weight",),
}
"""Tensors of a layer with the gated delta rule, and the weights that are in them."""
_BIASED = {"exp_probs_b.bias": ("feed_forward.expert_bias",)}
_OWN_TENSORS = dict.fromkeys(WITH_STATES, _OF_RULE) | dict.fromkeys(_CONVOLVING, _BIASED)
_ROPE_FACTORS = "rope_freqs.weight"
_WIDE_GEMMAS = (("gemma2", 46), ("gemma3", 62))
"""The 27B models, which llama.cpp knows by their layers, divide queries by the root of hidden size
/ heads; others by the root of a head's size."""
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
"""What ends a turn, in llama.cpp too, although a file names another token as the end."""
_MOST_PAIRS = 4096
"""Of dimensions of a head, that are rotated."""
CONTROL = 3
"""The type of tokens that are no text."""


def family_of(file: GgufFile) -> str:
    """What llama.cpp calls the architecture; ``ConfigError`` if it is not read."""
    name = file.value("general.architecture", str)
    if name not in _ARCHITECTURES:
        known = ", ".join(sorted(_ARCHITECTURES))
        raise file.error(f"is of architecture {name!r}; of GGUF files kvserve reads {known}")
    return str(name)


def config_of(path: Path) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """The fields of config.json, and the shapes of all tensors; ``ConfigError`` names what of the
    file is not read."""
    file = read_gguf(path)
    name = family_of(file)
    prefix = f"{name}."
    own = {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)}
    embedding = file.tensors.get("token_embd.weight")
    neutral = {**_NEUTRAL, **_OWN_NEUTRAL.get(name, {})}
    changing = (k for k, v in own.items() if np.ndim(v) or v not in neutral.get(k, ()))
    own_fields, with_states = _OWN_FIELDS.get(name, {}), name in WITH_STATES
    known = {*_KNOWN, *own_fields, *(_OF_STATES if with_states else ())}
    if unknown := sorted(set(changing) - known):
        raise file.error(f"sets {prefix}{unknown[0]} to {own[unknown[0]]}, which is not read")
    if file.value("split.count", int, 1) > 1:
        raise file.error("is one of several parts; llama-gguf-split --merge makes one of them")
    if missing := [field for field in own_fields if own.get(field) is None]:
        raise file.error(f"does not set {prefix}{missing[0]}")
    count = file.value(f"{prefix}expert_count", int, 0)
    if count and "expert_count" not in own_fields:
        raise file.error(f"has {count} experts, which of {name} are read of safetensors only")
    stored = {tensor for tensor in file.tensors if not _only_guesses(file, tensor)}
    if unread := sorted(stored - {*tensor_names(file).values(), _ROPE_FACTORS}):
        raise file.error(f"has a tensor {unread[0]} ({len(unread)} such) that is not read")
    if embedding is None:
        raise file.error("has no tensor token_embd.weight; is it a language model?")
    architecture, model_type = _ARCHITECTURES[name]
    kinds = {tensor.kind.name for tensor in file.tensors.values()}
    matrices = {tensor.kind.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    fields = {**_FIELDS, **own_fields}
    config = {ours: own[theirs] for theirs, ours in fields.items() if theirs in own}
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
    if count:
        config["norm_topk_prob"] = True  # as llama.cpp has it
    if with_states:
        config |= _of_states(file, name)
    if "conv_L_cache" in config:
        if "sliding_window" in config or config.get("partial_rotary_factor", 1) != 1:
            raise file.error("has windows, or rotates parts of heads, which is not read of LFM2")
        config |= _of_convolutions(file, name)
    rope = _rope(file, own)
    if name == "gemma3":
        local = {"rope_theta": own.get("rope.freq_base_swa", 10_000.0)}
        rope = {"full_attention": rope, "sliding_attention": local}
    shapes = [tensor.shape for tensor in file.tensors.values()]
    return {**config, "rope_parameters": rope}, shapes


def sampling_of(path: Path) -> dict[str, Any]:
    """The fields of generation_config.json that the file suggests."""
    file = read_gguf(path)
    given = {ours: file.value(f"general.sampling.{n}", Real) for n, ours in _SAMPLING.items()}
    return {name: round(value, 6) for name, value in given.items() if value is not None}


def tensor_names(file: GgufFile) -> dict[str, str]:
    """The file's names of its tensors by those of transformers, for what is a decoder's."""
    family, names = family_of(file), dict[str, str]()
    of_a_layer, own_tensors = _NAMES.get(family, _OF_A_LAYER), _OWN_TENSORS.get(family, {})
    experts = "expert_count" in _OWN_FIELDS.get(family, {})
    for stored, tensor in file.tensors.items():
        base, whole, known = "", stored, _WHOLE
        if stored.startswith("blk."):
            layer, _, whole = stored[4:].partition(".")
            base, known = f"model.layers.{layer}.", of_a_layer
        part, _, kind = whole.rpartition(".")
        if _only_guesses(file, stored):
            continue
        if base and whole in own_tensors:
            found = [*own_tensors[whole]]
        elif kind not in ("weight", "bias"):
            continue
        elif base and experts and part in _OF_EXPERTS and len(tensor.shape) == 3:
            module, _, own = known[part.removesuffix("_exps")].partition(".")
            count = range(tensor.shape[0])
            found = [f"{module}.experts.{expert}.{own}.{kind}" for expert in count]
        else:
            found = [f"{known[part]}.{kind}"] if part in known else []
        names |= dict.fromkeys((base + weight for weight in found), stored)
    return names


def _only_guesses(file: GgufFile, stored: str) -> bool:
    """Whether a tensor is of the layers behind the last one, which guess further tokens."""
    family = family_of(file)
    guessing = file.value(f"{family}.nextn_predict_layers", int, 0)
    if not guessing or family not in WITH_STATES or not stored.startswith("blk."):
        return False
    layer = stored.split(".")[1]
    layers = file.value(f"{family}.block_count", int, 0)
    return layer.isdecimal() and int(layer) >= layers - guessing


def _of_states(file: GgufFile, family: str) -> dict[str, Any]:
    """What follows from several keys of a model with the gated delta rule."""
    inner, heads = (
        file.value(f"{family}.ssm.{name}", int, 0) for name in ("inner_size", "time_step_rank")
    )
    if not heads or inner % heads:
        raise file.error(f"has {family}.ssm.inner_size {inner} for {heads} heads")
    layers = file.value(f"{family}.block_count", int, 0)
    guessing = file.value(f"{family}.nextn_predict_layers", int, 0)
    # Of text all positions are one. Pairs outside of the first three sections would not be rotated.
    stored = file.value(f"{family}.rope.dimension_sections", np.ndarray)
    sections = [11, 11, 10, 0] if stored is None else [int(size) for size in stored]
    turns = len(sections) == 4 and 0 < sum(sections) <= _MOST_PAIRS and min(sections) >= 0
    turns = turns and not sections[3]
    if not turns or any(pair >= 3 * sections[pair % 3] for pair in range(sum(sections))):
        raise file.error(
            f"sets {family}.rope.dimension_sections to {shown(sections)}, which is not read"
        )
    return {"num_hidden_layers": layers - guessing, "linear_value_head_dim": inner // heads}


def _of_convolutions(file: GgufFile, family: str) -> dict[str, Any]:
    """Which layers of LFM2 attend: those that have heads of keys."""
    heads = file.value(f"{family}.attention.head_count_kv", np.ndarray, np.zeros(0))
    counts = {*heads.tolist()} - {0}
    if len(heads) != file.value(f"{family}.block_count", int, 0) or len(counts) != 1:
        raise file.error(f"sets {family}.attention.head_count_kv to {shown(heads.tolist())}")
    kinds = ["full_attention" if count else "conv" for count in heads]
    sizes = {"num_key_value_heads": counts.pop(), "block_auto_adjust_ff_dim": False}
    return {**sizes, "layer_types": kinds}


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
