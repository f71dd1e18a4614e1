"""Checkpoints in few bits, written by numpy, beside plain ones of what their weights mean."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import edit_config, write_checkpoint

GROUP = 16
Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, np.dtype[Any]]


# ---- configs ------------------------------------------------------------------------------------


def fp8_config(strategy: str = "tensor", **fields: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        **fields,
    }


def block_fp8(rows: int = 128, inputs: int = 128, **fields: Any) -> dict[str, Any]:
    """As Qwen publishes FP8."""
    base = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return {**base, "weight_block_size": [rows, inputs], **fields}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}


def gptq(bits: int = 4, **fields: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True}
    return {**base, "desc_act": False, **fields}


def pack(bits: int = 4, symmetric: bool = True, **fields: Any) -> dict[str, Any]:
    """compressed-tensors: 4 or 8 bits, and x as it is."""
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group"}
    weights |= {"group_size": GROUP, **fields}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {**fp8_config(), "format": "pack-quantized", "config_groups": groups}


def int8() -> dict[str, Any]:
    """compressed-tensors: W8A8."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    x = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": x}}
    return {**fp8_config(), "format": "int-quantized", "config_groups": groups}


def mixed(*groups: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """compressed-tensors: what each pattern of names is stored in; the last one has all others."""
    inner = {
        f"group_{place}": {
            **of["config_groups"]["group_0"],
            "targets": [f"re:.*{pattern}"],
            "format": of["format"],
        }
        for place, (pattern, of) in enumerate(groups)
    }
    return {**fp8_config(), "format": "mixed-precision", "config_groups": inner}


def nvfp4() -> dict[str, Any]:
    """compressed-tensors' W4A4."""
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group"}
    group = {"weights": {**weights, "group_size": 16}, "input_activations": {"num_bits": 4}}
    return {**fp8_config(), "format": "nvfp4-pack-quantized", "config_groups": {"group_0": group}}


def modelopt(algorithm: str = "NVFP4", **fields: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, **fields}


def auto_round(packing: str, **fields: Any) -> dict[str, Any]:
    base = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True}
    return {**base, "data_type": "int", "packing_format": packing, **fields}


# ---- weights ------------------------------------------------------------------------------------


def e4m3_values() -> Array:
    """What each of the 256 codes stands for: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    size = np.where((codes & 127) == 127, np.nan, size)
    return np.where(codes & 128, -size, size)


def to_fp8(weight: Array, *, per_channel: bool) -> tuple[Tensors, Array]:
    """Stored tensors of a weight, by what follows its module's name; and what they mean."""
    largest = np.abs(weight).max(axis=1, keepdims=True) if per_channel else np.abs(weight).max()
    scale = torch.tensor(np.atleast_1d(largest / 448)).bfloat16()
    codes = e4m3_codes(weight / scale.double().numpy())
    stored = {
        "weight": torch.tensor(codes).view(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.ones(1),
    }
    return stored, e4m3_values()[codes] * scale.double().numpy()


def e4m3_codes(ratio: Array) -> Array:
    """The nearest of its numbers."""
    table = e4m3_values()
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")[:254]
    place = np.searchsorted(table[order], ratio).clip(1, 253)
    below, above = order[place - 1], order[place]
    return np.where(ratio - table[below] < table[above] - ratio, below, above).astype(np.uint8)


def to_block_fp8(
    weight: Array, rows: int, inputs: int, scales: torch.dtype = torch.bfloat16
) -> tuple[Tensors, Array]:
    """A scale for each block, the last of which may be smaller."""
    outputs, width = weight.shape
    blocks = [
        [np.abs(weight[i : i + rows, j : j + inputs]).max() for j in range(0, width, inputs)]
        for i in range(0, outputs, rows)
    ]
    by_block = torch.tensor(np.array(blocks) / 448).to(scales)
    each = by_block.double().numpy()[np.arange(outputs) // rows][:, np.arange(width) // inputs]
    codes = e4m3_codes(weight / each)
    stored = {"weight": torch.tensor(codes).view(torch.float8_e4m3fn), "weight_scale_inv": by_block}
    return stored, e4m3_values()[codes] * each


def to_mxfp4(weight: Array) -> tuple[Tensors, Array]:
    """gpt-oss's experts [experts, in, out]: a power of two for each 32 inputs of an output."""
    experts, inputs, outputs = weight.shape
    groups = weight.transpose(0, 2, 1).reshape(experts, outputs, inputs // 32, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=-1, keepdims=True))) - 2
    ratio = groups / 2.0**exponents
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = np.abs(np.abs(ratio)[..., None] - sizes).argmin(axis=-1)
    numbers = sizes[code] * np.sign(ratio) * 2.0**exponents
    code = code + 8 * (ratio < 0)
    stored = {
        "_blocks": torch.tensor((code[..., ::2] | code[..., 1::2] << 4).astype(np.uint8)),
        "_scales": torch.tensor((exponents[..., 0] + 127).astype(np.uint8)),
    }
    return stored, numbers.reshape(experts, outputs, inputs).transpose(0, 2, 1)


def to_nvfp4(weight: Array, *, divided: bool) -> tuple[Tensors, Array]:
    """Two numbers in a byte, an e4m3 scale for each 16 inputs, and one of the weight's, by which
    compressed-tensors divides and ModelOpt multiplies."""
    groups = weight.reshape(len(weight), -1, 16)
    largest = np.abs(groups).max(axis=-1)
    whole = float(np.float32(largest.max() / 6 / 448))
    scales = torch.tensor(largest / 6 / whole).to(torch.float8_e4m3fn)
    numbers = scales.double().numpy()[..., None] * whole
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = np.abs(np.abs(groups / numbers)[..., None] - sizes).argmin(axis=-1)
    meant = (sizes[code] * np.sign(groups) * numbers).reshape(weight.shape)
    code = (code + 8 * (groups < 0)).reshape(weight.shape)
    pairs = torch.tensor((code[:, ::2] | code[:, 1::2] << 4).astype(np.uint8))
    if divided:
        factor = {"weight_global_scale": torch.tensor([1 / whole]).float()}
        return {"weight_packed": pairs, "weight_scale": scales, **factor}, meant
    factor = {"weight_scale_2": torch.tensor(whole).float(), "input_scale": torch.ones(())}
    return {"weight": pairs, "weight_scale": scales, **factor}, meant


def rounded_in_groups(
    weight: Array, bits: int, symmetric: bool, groups: Array
) -> tuple[Array, Array, Array]:
    """Unsigned levels [out, in], zeros and scales [out, G]; ``groups`` [in]: that of each input."""
    count, most = groups.max() + 1, 2**bits - 1
    numbers = np.zeros(weight.shape, np.int64)
    zeros, scales = np.zeros((len(weight), count), np.int64), np.zeros((len(weight), count))
    for group in range(count):
        part = weight[:, groups == group]
        low, high = part.min(axis=1), part.max(axis=1)
        if symmetric:
            high = np.abs(part).max(axis=1)
            low = -high
        scale = ((high - low) / most).astype(np.float16).astype(np.float64)
        zero = np.full(len(weight), 2 ** (bits - 1)) if symmetric else np.round(-low / scale)
        zeros[:, group], scales[:, group] = zero.clip(1, most), scale
        numbers[:, groups == group] = (
            np.round(part / scale[:, None]) + zeros[:, group, None]
        ).clip(0, most)
    return numbers, zeros, scales


def packed(numbers: Array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Any:
    """int32, of 32 / ``bits`` numbers along ``axis``, filled up with zeros; number ``order[i]`` of
    them is at place i."""
    each = 32 // bits
    rows = np.moveaxis(numbers, axis, -1)
    rows = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % each)])
    words = np.zeros((*rows.shape[:-1], rows.shape[-1] // each), np.int64)
    for place, number in enumerate(order or range(each)):
        words |= rows[..., number::each] << (bits * place)
    return torch.tensor(np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32))


def in_levels(name: str, weight: Array, config: dict[str, Any]) -> tuple[Tensors, Array]:
    """AWQ, GPTQ, and compressed-tensors' whole numbers: what is stored, and what it means."""
    method, inputs = config["quant_method"], weight.shape[1]
    of: dict[str, Any] = config
    if method == "compressed-tensors":
        of = config["config_groups"]["group_0"]["weights"]
    bits = int(of.get("num_bits") or of["bits"])
    symmetric = method != "awq" and bool(of.get("symmetric", of.get("sym")))
    size = of.get("group_size") or -1
    groups = np.arange(inputs) // (inputs if size == -1 else size)
    if of.get("desc_act") or of.get("actorder"):
        # As GPTQ has it: the same for the weights of one x.
        of_x = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")
        groups = np.random.default_rng(zlib.crc32(of_x.encode())).permutation(groups)
    levels, zeros, scales = rounded_in_groups(weight, bits, symmetric, groups)
    meant = (levels - zeros[:, groups]) * scales[:, groups]
    halves = torch.tensor(scales).half()
    order = torch.tensor(groups, dtype=torch.int32)
    if method == "awq":
        places = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {
            "qweight": packed(levels.T, 4, 1, places),
            "qzeros": packed(zeros.T, 4, 1, places),
        }
        return stored | {"scales": halves.T}, meant
    if method == "gptq":
        less = zeros.T - (config.get("checkpoint_format", "gptq") == "gptq")
        stored = {"qweight": packed(levels.T, bits, 0), "qzeros": packed(less, bits, 1)}
        return stored | {"scales": halves.T, "g_idx": order}, meant
    if config["format"] == "int-quantized":
        return {
            "weight": torch.tensor(levels - 128).to(torch.int8),
            "weight_scale": halves.bfloat16().float(),
        }, (levels - 128) * halves.bfloat16().double().numpy()
    stored = {"weight_packed": packed(levels, bits, 1), "weight_scale": halves}
    stored["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        stored["weight_zero_point"] = packed(zeros, bits, 0)
    if of.get("actorder") == "group":
        stored["weight_g_idx"] = order
    return stored, meant


def in_form(name: str, weight: Array, config: dict[str, Any]) -> tuple[Tensors, Array]:
    """What is stored of a weight under a ``quantization_config``, and what it means."""
    form, groups = config.get("format"), config.get("config_groups", {})
    if form == "mixed-precision":
        matching = (of for of in groups.values() if re.match(of["targets"][0][3:], name))
        own = next(matching)
        alone = {**config, "format": own["format"], "config_groups": {"group_0": own}}
        return in_form(name, weight, alone)
    if config["quant_method"] == "auto-round":
        extra: dict[str, Any] = config.get("extra_config", {})
        of_module: dict[str, Any] = next((x for n, x in extra.items() if n in name), {})
        method = "awq" if "awq" in config["packing_format"] else "gptq"
        version = "gptq" if "auto_gptq" in config["packing_format"] else "gptq_v2"
        config = {**config, **of_module, "quant_method": method, "checkpoint_format": version}
    for pattern, own in config.get("dynamic", {}).items():
        if re.match(pattern[2:], name):
            if pattern.startswith("-:"):
                return {"weight": torch.tensor(weight).float()}, weight
            config = {**config, **own}
    if config["quant_method"] == "fp8":
        rows, inputs = config["weight_block_size"] or weight.shape
        stored, meant = to_block_fp8(weight, rows, inputs)
        if config["activation_scheme"] == "static":
            stored["activation_scale"] = torch.ones(())
        return stored, meant
    algorithm = config.get("quant_algo", "")
    of_layers = config.get("quantized_layers", {})
    algorithm = next((x["quant_algo"] for n, x in of_layers.items() if n in name), algorithm)
    if "NVFP4" in algorithm or form == "nvfp4-pack-quantized":
        return to_nvfp4(weight, divided=not algorithm)
    if algorithm or form in ("float-quantized", "naive-quantized"):
        by = "tensor" if algorithm else groups["group_0"]["weights"]["strategy"]
        if by == "block":
            blocks = groups["group_0"]["weights"]["block_structure"]
            stored, meant = to_block_fp8(weight, *blocks)
            return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"]}, meant
        return to_fp8(weight, per_channel=by == "channel")
    return in_levels(name, weight, config)


# ---- checkpoints --------------------------------------------------------------------------------


def quantize(kind: str, directory: Path, config: dict[str, Any], **changes: Any) -> Path:
    """Write ``directory`` quantised, and return a plain checkpoint of what its weights mean."""
    write_checkpoint(kind, directory, **changes)
    write_checkpoint(kind, directory / "plain", **changes)
    return quantize_written(directory, config)


_KEPT = (".gate.", "shared_expert_gate", "conv1d", "in_proj_a.", "in_proj_b.", "in_proj_ba.")
"""What quantised files leave plain, in parts of names."""


def quantize_written(directory: Path, config: dict[str, Any]) -> Path:
    """Quantise what is in ``directory``, and in ``plain`` in it, where its meaning will be."""
    plain = directory / "plain"
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        of_experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        is_matrix = tensor.dim() > 1 and name.startswith("model.layers")
        is_matrix = is_matrix and not any(part in name for part in _KEPT)
        if not (of_experts if config is MXFP4 else is_matrix):
            stored[name] = meant[name] = tensor
            continue
        weight = tensor.double().numpy()
        parts, values = to_mxfp4(weight) if of_experts else in_form(name, weight, config)
        stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        meant[name] = torch.tensor(values).float()
    save_file({name: t.contiguous() for name, t in stored.items()}, directory / "model.safetensors")
    save_file({name: t.contiguous() for name, t in meant.items()}, plain / "model.safetensors")
    edit_config(directory, quantization_config=config)
    return plain
