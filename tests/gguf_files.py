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
Tables = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    checkpoint: Path,
    file: Path,
    family: str,
    kinds: Mapping[str, Kind] | None = None,
    facts: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> Path:
    """``kinds``: of tensors by the last word of their module's name (others: F32); ``facts`` adds
    metadata and tensors of its own."""
    config = json.loads((checkpoint / "config.json").read_text())
    writer = gguf.GGUFWriter(file, family)
    _write_facts(writer, config, family)
    facts(writer)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": config.get("num_key_value_heads"),
    }
    tensors: dict[str, Tensor] = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        part = module.rpartition(".")[2]
        values = tensor.float().numpy()
        if family == "llama" and part in heads:
            values = turned(values, heads[part])
        if family.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        kind = (kinds or {}).get(part, Kind.F32)
        stored = f"{names.get_name(module)}.{suffix}"
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
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_token_list([f"<{n}>" for n in range(config["vocab_size"])])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family.startswith("gemma"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    else:
        writer.add_rope_dimension_count(head_dim)
        writer.add_rope_freq_base(rope["rope_theta"])
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
