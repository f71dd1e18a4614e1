"""A checkpoint of transformers' Llama or Qwen2 as a GGUF file, which llama.cpp reads.

The file has no vocabulary: token ids go in and come out. Tensors keep their values, as float32 or
bfloat16; norms are always float32, as llama.cpp requires.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(model: Path, target: Path, dtype: str) -> None:
    """Write ``target`` from ``model/config.json`` and its safetensors files."""
    import gguf

    config = json.loads((model / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    _write_facts(writer, config)
    for name, values in tensors(model, config):
        _add(writer, name, values, "BF16" if dtype == "bfloat16" else "F32")
    _finish(writer)


def copy_gguf(source: Path, target: Path, form: str) -> None:
    """Write ``target`` as ``source``, with its matrices in ``form``."""
    import gguf

    reader = gguf.GGUFReader(source)
    name = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, name)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, *of = field.types
        writer.add_key_value(key, field.contents(), kind, *of)
    for each in reader.tensors:
        _add(writer, each.name, gguf.dequantize(each.data, each.tensor_type), form)
    _finish(writer)


def random_gguf(config: dict[str, Any], target: Path, form: str, seed: int) -> None:
    """Write a Llama of the sizes of ``config`` with random matrices in ``form``."""
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(target, "llama")
    _write_facts(writer, config)
    width, inner = config["hidden_size"], config["intermediate_size"]
    kv = width // config["num_attention_heads"] * config["num_key_value_heads"]
    rows = {"attn_q": width, "attn_k": kv, "attn_v": kv, "attn_output": width}
    rows |= {"ffn_gate": inner, "ffn_up": inner, "ffn_down": width}
    names = {"token_embd.weight": (config["vocab_size"], width), "output_norm.weight": (width,)}
    for layer in range(config["num_hidden_layers"]):
        for part, out in rows.items():
            taken = inner if part == "ffn_down" else width
            names[f"blk.{layer}.{part}.weight"] = (out, taken)
        names |= {f"blk.{layer}.{part}_norm.weight": (width,) for part in ("attn", "ffn")}
    for name, shape in names.items():
        values = np.ones(shape, np.float32)
        if len(shape) > 1:
            values = rng.standard_normal(shape, np.float32) * shape[1] ** -0.5
        _add(writer, name, values, form)
    _finish(writer)


def _add(writer: Any, name: str, values: np.ndarray, form: str) -> None:
    import gguf

    kind = getattr(gguf.GGMLQuantizationType, form)
    if values.ndim > 1:
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, values)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_facts(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_key_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_value_length(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def tensors(model: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors with llama.cpp's names and order of rows, as float32 values."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for file in sorted(model.glob("*.safetensors")):
        data = np.memmap(file, np.uint8, "r")
        start = 8 + int(data[:8].view("<u8")[0])
        for name, about in json.loads(data[8:start].tobytes()).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                flat = data[start + first : start + last]
                values = _float32(flat, about["dtype"]).reshape(about["shape"])
                name = _renamed(name)
                part = name.split(".")[-2]
                yield name, _interleaved(values, heads[part]) if part in heads else values


def _renamed(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _WHOLE:
        return f"{_WHOLE[module]}.{kind}"
    layer, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def _float32(flat: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return flat.view("<f4")
    if dtype != "BF16":
        raise ValueError(f"tensors of type {dtype} are not converted")
    return (flat.view("<u2").astype("<u4") << 16).view("<f4")


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of a head, transformers rows half a head apart.

    weight: [rows, width], or a bias [rows].
    """
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)
