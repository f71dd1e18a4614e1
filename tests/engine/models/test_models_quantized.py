"""FP8 and AWQ checkpoints, beside a plain one of the weights that numpy makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvserve import LLM, SamplingParams
from kvserve.engine.models import storage
from kvserve.log import ConfigError
from tests.checkpoints import generate, random_prompts, write_checkpoint
from tests.engine.recorder import Recorder

TOKENS = 24
PROMPTS = random_prompts([5, 40, 1])
GROUP = 16
Tensors = dict[str, torch.Tensor]
Array = np.ndarray[Any, np.dtype[Any]]


# ---- writing ------------------------------------------------------------------------------------


def e4m3_values() -> Array:
    """What each of the 256 codes stands for: sign, 4 bits of exponent (bias 7), 3 of mantissa."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(
        exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    )
    size = np.where((codes & 127) == 127, np.nan, size)
    return np.where(codes & 128, -size, size)


def to_fp8(weight: Array, per_channel: bool) -> tuple[Tensors, Array]:
    """Stored tensors of a weight, by what follows its module's name; and what they mean."""
    largest = np.abs(weight).max(axis=1, keepdims=True) if per_channel else np.abs(weight).max()
    scale = torch.tensor(np.atleast_1d(largest / 448)).bfloat16()
    table = e4m3_values()
    ratio = weight / scale.double().numpy()
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")[:254]
    place = np.searchsorted(table[order], ratio).clip(1, 253)
    below, above = order[place - 1], order[place]
    codes = np.where(ratio - table[below] < table[above] - ratio, below, above).astype(np.uint8)
    stored = {
        "weight": torch.tensor(codes).view(torch.float8_e4m3fn),
        "weight_scale": scale,
        "input_scale": torch.ones(1),
    }
    return stored, table[codes] * scale.double().numpy()


def to_awq(weight: Array, _: bool) -> tuple[Tensors, Array]:
    """Groups of 16 inputs; eight outputs share an int32 in AutoAWQ's order."""
    groups = weight.T.reshape(-1, GROUP, len(weight))  # [groups, 16, out]
    low, high = groups.min(axis=1, keepdims=True), groups.max(axis=1, keepdims=True)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.round(-low / scales).clip(0, 15).astype(np.int64)
    numbers = (np.round(groups / scales) + zeros).clip(0, 15).astype(np.int64)

    def pack(x: Array) -> torch.Tensor:
        packed = np.zeros((len(x), x.shape[1] // 8), np.int64)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed |= x[:, column::8] << (4 * place)
        return torch.tensor(packed.astype(np.uint32).view(np.int32))

    meant = ((numbers - zeros) * scales.astype(np.float64)).reshape(-1, len(weight)).T
    stored = {
        "qweight": pack(numbers.reshape(-1, len(weight))),
        "qzeros": pack(zeros[:, 0]),
        "scales": torch.tensor(scales[:, 0]),
    }
    return stored, meant


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


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}


def quantize(kind: str, directory: Path, config: dict[str, Any], per_channel: bool = False) -> Path:
    """Write ``directory`` quantised, and return a plain checkpoint of what its weights mean."""
    write_checkpoint(kind, directory)
    plain = directory / "plain"
    write_checkpoint(kind, plain)
    to_stored = to_awq if config is AWQ else to_fp8
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        of_experts = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        is_matrix = tensor.dim() > 1 and name.startswith("model.layers")
        if not (of_experts if config is MXFP4 else is_matrix):
            stored[name] = meant[name] = tensor
            continue
        weight = tensor.double().numpy()
        parts, values = to_mxfp4(weight) if of_experts else to_stored(weight, per_channel)
        stored |= {name.removesuffix("weight") + part: t for part, t in parts.items()}
        meant[name] = torch.tensor(values).float()
    save_file({name: t.contiguous() for name, t in stored.items()}, directory / "model.safetensors")
    save_file({name: t.contiguous() for name, t in meant.items()}, plain / "model.safetensors")
    set_config(directory, config)
    return plain


def set_config(directory: Path, config: dict[str, Any]) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "quantization_config": config}))


# ---- reading ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "config", "per_channel"),
    [
        ("llama", fp8_config(), False),
        ("qwen2", fp8_config("channel", format="naive-quantized"), True),
        ("llama", AWQ, False),
        ("qwen2", AWQ, False),
        ("gpt-oss", MXFP4, False),
    ],
)
def test_answers_are_those_of_the_dequantised_weights(
    kind: str,
    config: dict[str, Any],
    per_channel: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "_PIECE_BYTES", 4 * 96 * 40)  # pieces that divide no matrix
    expected = generate(quantize(kind, tmp_path, config, per_channel), PROMPTS, TOKENS)
    llm = LLM(str(tmp_path), dtype="float32", skip_tokenizer_init=True)
    recorder = Recorder(llm)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for i, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False)):
        assert output.outputs[0].token_ids == expected[i].token_ids
        logits = torch.stack(recorder.logits[i])
        torch.testing.assert_close(logits, expected[i].logits, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("config", [fp8_config("channel"), AWQ], ids=["fp8", "awq"])
def test_quantised_and_grouped_by_kv_head(config: dict[str, Any], tmp_path: Path) -> None:
    """InternLM2's fused matrix is reordered after it is dequantised: the very same weights."""
    plain = quantize("internlm2", tmp_path, config, per_channel=True)
    models = [
        LLM(str(path), dtype="float32", skip_tokenizer_init=True).engine.core.runner.model
        for path in (tmp_path, plain)
    ]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.to_dense(), other.to_dense(), atol=1e-7, rtol=1e-6)


def test_mxfp4_has_a_scale_for_each_32_numbers(tmp_path: Path) -> None:
    quantize("gpt-oss", tmp_path, MXFP4)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][..., :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"down_proj_scales in .*a scale for each 32 numbers"):
        LLM(str(tmp_path), skip_tokenizer_init=True)


def test_what_is_not_applied_is_said(tmp_path: Path) -> None:
    quantize("llama", tmp_path, fp8_config(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    save_file(tensors, tmp_path / "model.safetensors")
    llm = LLM(str(tmp_path), quantization="compressed-tensors", skip_tokenizer_init=True)
    (row,) = [row for row in llm.engine.core.info.summary if row[0] == "weights"]
    assert row[1] == "float32, from compressed-tensors"
    assert "the quantisation of activations and the quantised KV cache" in row[2]
    with pytest.raises(ConfigError, match=r"--quantization: awq .*says compressed-tensors"):
        LLM(str(tmp_path), quantization="awq", skip_tokenizer_init=True)


def without(part: str) -> Callable[[Path], None]:
    def drop(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        del tensors[f"model.layers.0.mlp.up_proj.{part}"]
        save_file(tensors, directory / "model.safetensors")

    return drop


def with_scale(scale: torch.Tensor) -> Callable[[Path], None]:
    def replace(directory: Path) -> None:
        tensors = load_file(directory / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight_scale"] = scale
        save_file(tensors, directory / "model.safetensors")

    return replace


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "break_it", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, "by 'gptq'; kvserve reads"),
        ({"quant_method": "bitsandbytes"}, None, "'bitsandbytes'"),
        ({"quant_method": "fp8"}, None, "'fp8'"),
        ({**AWQ, "version": "gemv"}, None, "version gemv"),
        ({**AWQ, "bits": 3}, None, "bits 3"),
        ({**AWQ, "zero_point": False}, None, "zero_point False"),
        (fp8_config(format="pack-quantized"), None, "'pack-quantized'"),
        (fp8_config("block"), None, "one scale per block"),
        (fp8_config(config_groups={"g": {"weights": INT4}}), None, "int4 weights"),
        (fp8_config(config_groups={}), None, "without config_groups"),
        (fp8_config(transform_config={"R1": {}}), None, "transform_config"),
        (fp8_config(), without("weight_scale"), "up_proj.weight in .*no scale for it"),
        (fp8_config(), with_scale(torch.ones(3)), r"up_proj.weight_scale in .* shape \(3,\)"),
        (fp8_config(), with_scale(torch.full([1], torch.nan)), "up_proj.weight in .*NaN"),
        (AWQ, without("qzeros"), "no tensor .*up_proj.weight"),
    ],
)
def test_what_is_not_read_is_named(
    config: dict[str, Any],
    break_it: Callable[[Path], None] | None,
    message: str,
    tmp_path: Path,
) -> None:
    if break_it is None:
        set_config(write_checkpoint("llama", tmp_path), config)
    else:
        quantize("llama", tmp_path, config)
        break_it(tmp_path)
    with pytest.raises(ConfigError, match=message) as refused:
        LLM(str(tmp_path), skip_tokenizer_init=True)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)
