"""GGUF files of transformers' checkpoints, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

Kind = gguf.GGMLQuantizationType


def write_gguf(
    checkpoint: Path,
    file: Path,
    family: str,
    kinds: Mapping[str, Kind] | None = None,
    facts: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    *,
    side_by_side: bool = False,
    without: str | None = None,
) -> Path:
    """``kinds``: of tensors by the last word of their module's name (others: F32); ``facts`` adds
    metadata and tensors of its own; ``side_by_side``: Qwen3-Next as it was converted first;
    ``without``: a module that is left out."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, family)
    _write_facts(writer, config, family)
    facts(writer)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config.get("num_key_value_heads")}
    tensors: dict[str, Tensor] = load_file(checkpoint / "model.safetensors")
    numbers = {name: tensor.float().numpy() for name, tensor in tensors.items()}
    for name, values in converted(numbers, config, family, side_by_side=side_by_side).items():
        if without is not None and without in name:
            continue
        module, _, suffix = name.rpartition(".")
        part = module.rpartition(".")[2]
        if suffix not in ("weight", "bias"):  # linear_attn.A_log
            module, suffix = name, ""
        if family == "llama" and part in heads:
            values = turned(values, heads[part])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        kind = (kinds or {}).get(part, Kind.F32)
        stored = f"{names.get_name(module)}.{suffix}".removesuffix(".")
        writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _write_facts(writer: gguf.GGUFWriter, config: dict[str, Any], family: str) -> None:
    rope = config["rope_parameters"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    heads, convolving = config["num_key_value_heads"], family.startswith("lfm2")
    attending = ["full" in kind for kind in config.get("layer_types") or ()]
    writer.add_head_count_kv([heads * each for each in attending] if convolving else heads)
    writer.add_layer_norm_rms_eps(config["norm_eps" if convolving else "rms_norm_eps"])
    if convolving:
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    if family == "lfm2moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_token_list([f"<{n}>" for n in range(config["vocab_size"])])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    else:
        share = rope.get("partial_rotary_factor", 1.0)
        writer.add_rope_dimension_count(int(head_dim * share))
        writer.add_rope_freq_base(rope["rope_theta"])
    _of_experts(writer, config)
    if "linear_num_key_heads" in config:
        _of_states(writer, config, family)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma3" and config["layer_types"][5:6] != ["full_attention"]:
        writer.add_sliding_window_pattern(["sliding" in kind for kind in config["layer_types"]])
    if family == "phi3":
        writer.add_sliding_window(config["sliding_window"] or 0)
        writer.add_rope_scaling_orig_ctx_len(config["max_position_embeddings"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _of_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    if count := config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _of_states(writer: gguf.GGUFWriter, config: dict[str, Any], family: str) -> None:
    heads, key_heads = config["linear_num_value_heads"], config["linear_num_key_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(key_heads)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if family != "qwen3next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def converted(
    tensors: dict[str, np.ndarray], config: dict[str, Any], family: str, *, side_by_side: bool
) -> dict[str, np.ndarray]:
    """Mixtures of experts, Qwen 3.5 and Qwen3-Next as the converter writes them, under names that
    gguf's table knows: experts in one tensor; of layers with the rule rates as they are, dt as a
    bias, and value head j of key head g at ``j Hk + g`` (Qwen 3.5)."""
    found, experts = dict[str, np.ndarray](), dict[str, list[np.ndarray]]()
    for name, values in tensors.items():
        layer, _, rest = name.partition(".mlp.experts.")
        if rest:
            experts.setdefault(f"{layer}.mlp.experts.{rest.partition('.')[2]}", []).append(values)
        elif ".linear_attn." in name:
            found |= _rule_converted(name, values, config, family, side_by_side)
        elif ".feed_forward.experts." in name:  # gguf's table has them without "model."
            layer, _, rest = name.removeprefix("model.").partition("experts.")
            own = f"{layer}experts.{rest.partition('.')[2]}"
            experts.setdefault(own, []).append(values)
        elif name.endswith(".conv.conv.weight"):
            found[name] = values.squeeze(1)
        elif family in ("qwen35", "qwen35moe", "qwen3next") and name.endswith("norm.weight"):
            found[name] = values + 1
        else:
            name = name.replace(".expert_bias", ".expert_bias.bias")
            found[name] = values.squeeze(0) if "shared_expert_gate" in name else values
    return found | {name: np.stack(parts) for name, parts in experts.items()}


def _rule_converted(
    name: str, values: np.ndarray, config: dict[str, Any], family: str, side_by_side: bool
) -> dict[str, np.ndarray]:
    layer, part = name.split("linear_attn.")
    key_heads, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
    keys = 2 * key_heads * key_dim

    def tiled(x: np.ndarray, size: int) -> np.ndarray:
        by_head = x.reshape(key_heads, heads // key_heads, size, *x.shape[1:])
        return by_head.swapaxes(0, 1).reshape(x.shape)

    if part == "in_proj_qkvz.weight" and not side_by_side:
        each = heads // key_heads * value_dim
        of_group = values.reshape(key_heads, -1, values.shape[1])
        parts = np.split(of_group, np.cumsum([key_dim, key_dim, each]), axis=1)
        q, k, v, z = (one.reshape(-1, values.shape[1]) for one in parts)
        base = f"{layer}linear_attn."
        return {
            f"{base}in_proj_qkv.weight": np.concatenate([q, k, v]),
            f"{base}in_proj_z.weight": z,
        }
    if part == "conv1d.weight":
        values = values.squeeze(1)
    if family != "qwen3next" and part in ("in_proj_qkv.weight", "conv1d.weight"):
        values = np.concatenate([values[:keys], tiled(values[keys:], value_dim)])
    elif family != "qwen3next" and part == "in_proj_z.weight":
        values = tiled(values, value_dim)
    elif family != "qwen3next" and part == "out_proj.weight":
        values = tiled(values.T, value_dim).T
    elif family != "qwen3next" and part != "norm.weight":
        values = tiled(values, 1)
    if part == "A_log":
        values = -np.exp(values)
    return {name.replace("dt_bias", "dt_proj.bias"): values}


def turned(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, transformers rows half a head apart."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(head_dim: int, theta: float, factor: float) -> np.ndarray:
    """What llama.cpp's converter writes of RoPE type llama3 (8,192 tokens before scaling)."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    found = []
    for length in wavelengths:
        smooth = (8192 / length - 1) / (4 - 1)
        middle = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if length < 8192 / 4 else factor if length > 8192 else middle)
    return np.array(found, np.float32)


def dequantised(checkpoint: Path, kinds: Mapping[str, Kind]) -> dict[str, Tensor]:
    """The checkpoint's tensors as they are once they have been stored in these types."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        kind = kinds.get(name.split(".")[-2])
        if kind is not None:
            tensors[name] = torch.from_numpy(
                gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind).reshape(tensor.shape)
            )
    return tensors
