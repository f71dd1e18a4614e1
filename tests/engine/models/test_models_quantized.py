"""Checkpoints in few bits, beside plain ones of the weights that numpy makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kvserve.config import QUANTIZATIONS, ModelConfig
from kvserve.engine.models import held, plain_storage
from kvserve.engine.models.linear import linear
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.quantization import PARSERS
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.layer import linear_cpu as linear_numbers
from kvserve.kernels.layer import weight_levels_cpu as linear_levels
from kvserve.kernels.layer.weight_levels import Levels
from kvserve.log import ConfigError
from tests.checkpoints import (
    Generated,
    edit_config,
    edited_tensors,
    generate,
    random_prompts,
    read_spec,
    write_checkpoint,
)
from tests.engine.models.decoding import check_parity, make, row_of, tokens
from tests.quantized_checkpoints import (
    AWQ,
    GROUP,
    MXFP4,
    auto_round,
    block_fp8,
    fp8_config,
    gptq,
    int8,
    mixed,
    modelopt,
    nvfp4,
    pack,
    quantize,
)
from tests.thinning import slow

TOKENS = 24
PROMPTS = random_prompts([5, 40, 1])


def check(directory: Path, expected: list[Generated], **settings: Any) -> tuple[str, ...]:
    """Tokens and logits; returns the start-up table's row."""
    llm = check_parity(directory, PROMPTS, expected, 1e-4, **settings)
    llm.engine.core.close()
    return row_of(llm, "weights")


def fp8_blocks(rows: int, inputs: int) -> dict[str, Any]:
    """compressed-tensors' FP8 with a scale for each block."""
    config = fp8_config("block")
    config["config_groups"]["group_0"]["weights"]["block_structure"] = [rows, inputs]
    return config


FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "fp8": ("llama", fp8_config(), {}, "FP8"),
    "fp8 by channel": ("qwen2", fp8_config("channel", format="naive-quantized"), {}, "FP8"),
    "fp8 in blocks": ("qwen3", block_fp8(), {"hidden_size": 192, "intermediate_size": 320}, "FP8"),
    "fp8 in small blocks": ("llama", block_fp8(48, 20), {}, "FP8"),
    "fp8 in blocks, experts": ("qwen3-moe", block_fp8(16, 32), {}, "FP8"),
    "fp8, one scale": ("qwen2", block_fp8(weight_block_size=None), {}, "FP8"),
    "fp8, static": ("llama", block_fp8(activation_scheme="static"), {}, "FP8"),
    "fp8, blocks of compressed-tensors": ("llama", fp8_blocks(64, 32), {}, "FP8"),
    "awq": ("llama", AWQ, {}, "4 bits"),
    "awq with biases": ("qwen2", AWQ, {}, "4 bits"),
    "awq, odd": ("llama", {**AWQ, "group_size": 8}, {"intermediate_size": 72}, "4 bits"),
    "awq, experts": ("qwen3-moe", AWQ, {}, "4 bits"),
    "gptq": ("llama", gptq(), {}, "4 bits"),
    "gptq, one group": ("llama", gptq(group_size=-1), {}, "4 bits"),
    "gptq 2, zeros": ("llama", gptq(sym=False, checkpoint_format="gptq_v2"), {}, "4 bits"),
    "gptq, 8 bits": ("llama", gptq(8), {}, "8 bits"),
    "gptq, 8 bits, zeros": ("qwen2", gptq(8, sym=False, desc_act=True), {}, "8 bits"),
    "gptq, desc_act": ("llama", gptq(desc_act=True), {}, "4 bits"),
    "gptq, desc_act, experts": ("mixtral", gptq(sym=False, desc_act=True), {}, "4 bits"),
    "pack": ("llama", pack(), {}, "4 bits"),
    "pack, odd": ("llama", pack(group_size=20), {"intermediate_size": 100}, "4 bits"),
    "pack, zeros, ordered": ("llama", pack(symmetric=False, actorder="group"), {}, "4 bits"),
    "pack, 8 bits": ("llama", pack(8, strategy="channel", group_size=None), {}, "8 bits"),
    "mxfp4": ("gpt-oss", MXFP4, {}, "float32"),
    "mixed, 4 and 8 bits": (
        "llama",
        mixed(("mlp", pack()), ("[ov]_proj", pack(8)), ("", pack(symmetric=False))),
        {},
        "4 bits and 8 bits, else float32",
    ),
    "mixed, FP8 and groups of several sizes": (
        "llama",
        mixed(("down", fp8_config()), ("o_proj", pack(group_size=32)), ("", pack(8))),
        {},
        "4 bits and 8 bits and FP8",
    ),
    "mixed, FP8 and FP4": ("llama", mixed(("mlp", nvfp4()), ("", fp8_config())), {}, "FP8"),
    "nvfp4": ("llama", nvfp4(), {}, "float32"),
    "modelopt, nvfp4": ("qwen2", modelopt(), {}, "float32"),
    "modelopt, fp8": ("llama", modelopt("FP8"), {}, "FP8"),
    "modelopt, mixed": (
        "llama",
        modelopt(
            "MIXED_PRECISION",
            quantized_layers={"mlp": {"quant_algo": "NVFP4"}, "self_attn": {"quant_algo": "FP8"}},
        ),
        {},
        "FP8",
    ),
    "gptq that skips": ("llama", gptq(dynamic={"-:.*k_proj": {}, "-:.*down": {}}), {}, "4 bits"),
    "gptq, some in 8 bits": (
        "llama",
        gptq(dynamic={"+:.*mlp": {"bits": 8, "sym": False}, "-:.*o_proj": {}}),
        {},
        "4 bits and 8 bits",
    ),
    "auto-round": ("llama", auto_round("auto_round:auto_gptq"), {}, "4 bits"),
    "auto-round, its own": ("qwen2", auto_round("auto_round", sym=False), {}, "4 bits"),
    "auto-round, awq": ("llama", auto_round("auto_round:auto_awq"), {}, "4 bits"),
    "auto-round, some in 8 bits": (
        "llama",
        auto_round("auto_round:auto_gptq", extra_config={"o_proj": {"bits": 8}}),
        {},
        "4 bits and 8 bits",
    ),
}

WIDENED = {"fp8", "fp8 in blocks", "awq", "gptq, desc_act, experts", "pack, zeros, ordered"}
"""Each way to store levels, once."""


@pytest.mark.compiler
@pytest.mark.parametrize("form", FORMS)
def test_answers_are_those_of_the_dequantised_weights(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, config, changes, held_as = FORMS[form]
    monkeypatch.setattr(plain_storage, "_PIECE_BYTES", 4 * 96 * 40)  # pieces that divide no matrix
    plain = quantize(kind, tmp_path, config, **changes)
    expected = generate(plain, PROMPTS, TOKENS)
    row = check(tmp_path, expected)
    assert row[1].startswith(held_as)
    widened = "widened when read" if config is MXFP4 else "12 matrices are widened: there is no"
    assert row[2].startswith("as stored" if held_as != "float32" else widened), row
    if form not in WIDENED:
        return
    # Where nothing multiplies levels, the weights are widened, and it is said.
    monkeypatch.setattr(held, "select_level_product", lambda *_: ("", "there is no product"))
    row = check(tmp_path, expected)
    assert row[1].startswith("float32, from") and "widened: there is no product" in row[2]


@pytest.mark.compiler
@pytest.mark.parametrize("desc_act", [False, True])
def test_gptq_without_orders(tmp_path: Path, *, desc_act: bool) -> None:
    """Where inputs are in order, a file may leave it out; else that is what is missing."""
    config = gptq(desc_act=desc_act)
    plain = quantize("llama", tmp_path, config)
    with edited_tensors(tmp_path) as tensors:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]
    if not desc_act:
        check(tmp_path, generate(plain, PROMPTS, TOKENS))
        return
    with pytest.raises(ConfigError, match=r"no tensor .*\.g_idx \("):
        make(tmp_path)


def test_modelopt_beside_config(tmp_path: Path) -> None:
    """As it was written first: in a file of its own."""
    plain = quantize("llama", tmp_path, modelopt())
    edit_config(tmp_path, quantization_config=None)
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    check(tmp_path, generate(plain, PROMPTS, TOKENS))


@pytest.mark.compiler
@pytest.mark.parametrize(
    "form",
    [
        "awq, experts",
        "mixed, FP8 and FP4",
        "fp8 in blocks",
        *slow("gptq, 8 bits, zeros", "fp8 by channel", "awq", "pack, odd"),
    ],
)
def test_ranks_hold_their_parts(form: str, tmp_path: Path) -> None:
    kind, config, changes, held_as = FORMS[form]
    plain = quantize(kind, tmp_path, config, **changes)
    row = check(tmp_path, generate(plain, PROMPTS, TOKENS), tensor_parallel_size=2)
    assert row[1].startswith(held_as) and row[2].startswith("as stored")


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["mixtral", *slow("llama")])
def test_ranks_that_have_some_of_each_group(kind: str, tmp_path: Path) -> None:
    """Groups of 64 in any order: a rank brings its own together, and fills them up."""
    config = gptq(group_size=64, desc_act=True)
    plain = quantize(kind, tmp_path, config, hidden_size=128, intermediate_size=192, head_dim=16)
    check(tmp_path, generate(plain, PROMPTS, TOKENS), tensor_parallel_size=2)


@pytest.mark.compiler
def test_parts_with_inputs_in_several_orders_are_widened(tmp_path: Path) -> None:
    plain = quantize("llama", tmp_path, gptq(desc_act=True))
    key = "model.layers.1.self_attn.k_proj"  # the same weights, whose inputs change places
    with edited_tensors(tmp_path) as tensors, edited_tensors(plain) as meant:
        for name, shift in (("qweight", GROUP // 8), ("g_idx", GROUP)):
            tensors[f"{key}.{name}"] = tensors[f"{key}.{name}"].roll(shift, 0)
        meant[f"{key}.weight"] = meant[f"{key}.weight"].roll(GROUP, 1)
    row = check(tmp_path, generate(plain, PROMPTS, TOKENS))
    assert row[2].endswith("1 matrices are widened: its parts have their inputs in several orders")


@pytest.mark.compiler
def test_activations_in_8_bits(tmp_path: Path) -> None:
    """W8A8: each linear layer's x is rounded at a scale of each token, whose largest number becomes
    127.5 and is cut; so that is a tie, and a model amplifies on which side it falls."""
    plain = quantize("llama", tmp_path, int8())
    models = [
        load_model(path, ModelConfig(), read_spec(path), torch.float32, "cpu")
        for path in (tmp_path, plain)
    ]
    x = torch.randn(33, 64)
    x[3] = 0.0
    step = x.abs().amax(-1, keepdim=True) / 127.5
    rounded = (x / step.masked_fill(step == 0, 1.0)).round().clamp(-128, 127) * step
    for held_so, meant in zip(*(model.decoder_layers for model in models), strict=True):
        found, expected = linear(x, held_so.qkv), linear(rounded, meant.qkv)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    llm = make(tmp_path)
    assert all(tokens(llm, PROMPTS, 16))
    row = row_of(llm, "weights")
    assert row[2] == "as stored; x is rounded to 8 bits too, at a scale per token"


@pytest.mark.parametrize("config", [fp8_config("channel"), AWQ, pack()], ids=["fp8", "awq", "pack"])
def test_quantised_and_grouped_by_kv_head(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """InternLM2's fused matrix is reordered: the very same weights."""
    plain = quantize("internlm2", tmp_path, config)
    monkeypatch.setattr("kvserve.engine.models.loader.select_product", lambda *_: ("torch", ""))
    held_so, meant = (
        load_model(path, ModelConfig(), read_spec(path), torch.float32, "cpu")
        for path in (tmp_path, plain)
    )
    for one, other in zip(held_so.decoder_layers, meant.decoder_layers, strict=True):
        pairs = [(one.qkv, other.qkv), (one.out, other.out), (one.mlp.down, other.mlp.down)]
        for levels, numbers in pairs:
            assert isinstance(levels, Levels) and isinstance(numbers, torch.nn.Parameter)
            found = levels.numbers(slice(None))
            torch.testing.assert_close(found, numbers.data, atol=1e-7, rtol=1e-6)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "config",
    [*slow({**AWQ, "group_size": 128}), gptq(group_size=128, desc_act=True)],
    ids=["awq", "gptq"],
)
def test_weights_take_their_bits(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mean weight of the layers takes 4 bits and a share of its group's scale and zero."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_attention_heads": 16,
    }
    sizes |= {"num_hidden_layers": 2, "head_dim": 64, "num_key_value_heads": 4}
    quantize("llama", tmp_path, config, **sizes)
    model = loaded_in_pieces(tmp_path, monkeypatch)
    matrices = [getattr(layer, name) for layer in model.decoder_layers for name in ("qkv", "out")]
    matrices += [getattr(x.mlp, name) for x in model.decoder_layers for name in ("gate_up", "down")]
    count = sum(matrix.shape.numel() for matrix in matrices)
    assert sum(matrix.nbytes for matrix in matrices) / count < 0.54  # bytes


@pytest.mark.compiler
@pytest.mark.parametrize("plain", [True, False])
def test_a_tied_table_is_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, plain: bool
) -> None:
    """Numbers that rows are looked up in and that are multiplied with, once in memory; as many rows
    as fill no panel."""
    sizes: dict[str, Any] = {"vocab_size": 8003, "num_hidden_layers": 1}
    sizes |= {"hidden_size": 512, "head_dim": 16}
    kind = "llama-mha-tied"
    write_checkpoint(kind, tmp_path, **sizes) if plain else quantize(kind, tmp_path, AWQ, **sizes)
    model = loaded_in_pieces(tmp_path, monkeypatch)
    assert model.embedding is model.head
    stored = (tmp_path / "model.safetensors").stat().st_size
    assert sum(part.nbytes for part in model.parameters()) < 1.02 * stored


@pytest.mark.compiler
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gpt-oss"])
def test_nothing_is_held_twice_as_it_is_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 512}
    write_checkpoint(kind, tmp_path, **sizes, num_hidden_layers=4)
    with edited_tensors(tmp_path) as tensors:  # each piece is widened
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
    loaded_in_pieces(tmp_path, monkeypatch)


def loaded_in_pieces(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """In float32. All tensors together never take more than 1.15 times the result."""
    monkeypatch.setattr(plain_storage, "_PIECE_BYTES", 2**20)
    monkeypatch.setattr(linear_levels, "_PIECE", 2**18)
    monkeypatch.setattr(linear_numbers, "_PIECE", 2**18)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        model = load_model(directory, ModelConfig(), read_spec(directory), torch.float32, "cpu")
    result = sum(part.nbytes for part in model.parameters())
    file = (directory / "model.safetensors").stat().st_size  # of which torch counts maps
    events = profiled.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    taken = [(e.start_ns(), e.nbytes()) for e in memory if abs(e.nbytes()) != file]
    peak = total = 0
    for _, size in sorted(taken):
        total += size
        peak = max(peak, total)
    assert result <= peak < 1.15 * result, f"{peak:,} of {result:,}"
    return model


def test_mxfp4_has_a_scale_for_each_32_numbers(tmp_path: Path) -> None:
    quantize("gpt-oss", tmp_path, MXFP4)
    name = "model.layers.0.mlp.experts.down_proj_scales"
    with edited_tensors(tmp_path) as tensors:
        tensors[name] = tensors[name][..., :-1].contiguous()
    with pytest.raises(ConfigError, match=r"down_proj_scales in .*a scale for each 32 numbers"):
        make(tmp_path)


@pytest.mark.compiler
def test_what_is_not_applied_is_said(tmp_path: Path) -> None:
    quantize("llama", tmp_path, fp8_config(kv_cache_scheme={"num_bits": 8, "type": "float"}))
    with edited_tensors(tmp_path) as tensors:
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    row = row_of(make(tmp_path, quantization="compressed-tensors"), "weights")
    assert row[1] == "FP8, else float32, from compressed-tensors"
    assert "the quantisation of activations and the quantised KV cache" in row[2]
    with pytest.raises(ConfigError, match=r"--quantization: awq .*says compressed-tensors"):
        make(tmp_path, quantization="awq")


def put(part: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    """Another tensor of one weight's, or none."""

    def change(directory: Path) -> None:
        with edited_tensors(directory) as tensors:
            del tensors[f"model.layers.0.mlp.up_proj.{part}"]
            if tensor is not None:
                tensors[f"model.layers.0.mlp.up_proj.{part}"] = tensor

    return change


def static_x() -> dict[str, Any]:
    config = int8()
    config["config_groups"]["group_0"]["input_activations"]["dynamic"] = False
    return config


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "symmetric": True}


@pytest.mark.parametrize(
    ("config", "break_it", "message"),
    [
        (gptq(3), None, "gptq with bits 3; kvserve reads"),
        (gptq(checkpoint_format="marlin"), None, "checkpoint_format marlin"),
        (gptq(dynamic={"+:.*mlp": {"bits": 3}}), None, "gptq with bits 3"),
        (auto_round("auto_round:llm_compressor"), None, "packing_format auto_round:llm_compressor"),
        (auto_round("auto_round", act_bits=8), None, "activations in 8 bits"),
        (modelopt("NVFP4_AWQ"), None, "modelopt with quant_algo .*NVFP4_AWQ"),
        (nvfp4(), put("weight_scale", torch.ones(96, 4)), "a scale of 8 bits for each 16"),
        (nvfp4(), put("weight_global_scale", None), "no tensor .*up_proj.weight_global_scale"),
        ({"quant_method": "bitsandbytes"}, None, "'bitsandbytes'"),
        (block_fp8(fmt="e5m2"), None, "fp8 with fmt 'e5m2'"),
        (block_fp8(expert_dtype="fp4"), None, "fp8 with expert_dtype 'fp4'"),
        (block_fp8(activation_scheme="none"), None, "fp8 with activation_scheme 'none'"),
        (block_fp8(0), None, r"fp8 with blocks of \[0, 128\]"),
        (block_fp8(weight_block_size=[128]), None, r"fp8 with blocks of \[128\]"),
        (block_fp8(32, 32), put("weight_scale_inv", torch.ones(3, 1)), "in blocks of 32 x 32"),
        (block_fp8(32, 32), put("weight_scale_inv", torch.ones(1, 1)), "in blocks of 32 x 32"),
        (
            block_fp8(32, 32),
            put("weight_scale_inv", torch.ones(3, 2, dtype=torch.uint8)),
            "weight_scale_inv in .* is uint8, of which kvserve reads no scales",
        ),
        (block_fp8(), put("weight_scale_inv", None), "up_proj.weight in .*no scale for it"),
        ({**AWQ, "version": "gemv"}, None, "version gemv"),
        ({**AWQ, "bits": 3}, None, "bits 3"),
        ({**AWQ, "zero_point": False}, None, "zero_point False"),
        (fp8_config(format="marlin-24"), None, "'marlin-24'"),
        (fp8_config(format="pack-quantized"), None, "as float8 weights"),
        (static_x(), None, "activations in 8 bits, not token by token"),
        (fp8_config("block"), None, "compressed-tensors with blocks of None"),
        (fp8_config(config_groups={"g": {"weights": INT4}}), None, "int4 weights"),
        (fp8_config(config_groups={}), None, "without config_groups"),
        (fp8_config(transform_config={"R1": {}}), None, "transform_config"),
        (fp8_config(), put("weight_scale", None), "up_proj.weight in .*no scale for it"),
        (fp8_config(), put("weight_scale", torch.ones(3)), r"weight_scale in .* shape \(3,\)"),
        (fp8_config(), put("weight_scale", torch.tensor([torch.nan])), "up_proj.weight in .*NaN"),
        (AWQ, put("qzeros", None), "no tensor .*up_proj.qzeros"),
        (
            gptq(),
            put("qzeros", torch.zeros(4, 12, dtype=torch.int32)),
            "up_proj.qzeros in .*set sym to false",
        ),
        (
            gptq(),
            lambda d: edit_config(d, quantization_config=gptq(group_size=32)),
            "scales in .* in groups of 32",
        ),
    ],
)
def test_what_is_not_read_is_named(
    config: dict[str, Any], break_it: Callable[[Path], None] | None, message: str, tmp_path: Path
) -> None:
    if break_it is None:
        edit_config(write_checkpoint("llama", tmp_path), quantization_config=config)
    else:
        quantize("llama", tmp_path, config)
        break_it(tmp_path)
    with pytest.raises(ConfigError, match=message) as refused:
        make(tmp_path)
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_flag_has_every_method_that_is_read() -> None:
    assert {*QUANTIZATIONS} == {*PARSERS}
