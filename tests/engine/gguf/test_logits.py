"""Logits of GGUF files beside transformers' of the checkpoints that they were made of."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from kvserve.config import ModelConfig
from kvserve.engine.gguf.tensors import GgufTensors
from kvserve.engine.models.generation import read_generation_config
from kvserve.engine.models.implementation import choose_spec
from kvserve.kernels.layer.weight_levels import Levels
from kvserve.log import ConfigError
from tests.checkpoints import generate, random_prompts, read_spec, write_checkpoint
from tests.engine.models.decoding import check_parity, make, row_of
from tests.gguf_files import Kind, dequantised, llama3_factors, write_gguf

PROMPTS, TOKENS = random_prompts([5, 90, 1, 33]), 40
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True, "num_key_value_heads": 8},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {},
    "phi3": {"sliding_window": 24},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {"rope_parameters": {**YARN, "original_max_position_embeddings": 512}}),
    ("gemma3", {"num_hidden_layers": 7, "layer_types": None}),  # the pattern that is not stated
    ("phi3", {"sliding_window": None}),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    directory = write_checkpoint(family, tmp_path / "model", **FAMILIES[family])
    file = write_gguf(directory, tmp_path / "model.gguf", family)
    check_parity(file, PROMPTS, generate(directory, PROMPTS, TOKENS))


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=[family for family, _ in VARIANTS])
def test_variants_have_the_same_spec(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    directory = write_checkpoint(family, tmp_path / "model", **changes)
    spec = read_spec(write_gguf(directory, tmp_path / "model.gguf", family))
    same: dict[str, Any] = {"stored_as": "", "rms_norm_eps": pytest.approx(spec.rms_norm_eps)}
    assert replace(spec, **same) == read_spec(directory)


@pytest.mark.compiler
def test_stored_types_are_widened(tmp_path: Path) -> None:
    """Queries, keys and values are one matrix, whose parts have several forms; gates and ups too.
    Queries and keys have their rows in another order."""
    kinds = {
        **{"q_proj": Kind.Q8_0, "k_proj": Kind.Q5_0, "v_proj": Kind.Q4_1, "o_proj": Kind.Q5_1},
        **{"gate_proj": Kind.Q4_0, "up_proj": Kind.BF16, "down_proj": Kind.F16},
        **{"embed_tokens": Kind.Q8_0},
    }
    directory = write_checkpoint("llama", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", kinds)
    save_file(dequantised(directory, kinds), directory / "model.safetensors", {"format": "pt"})
    llm = check_parity(file, PROMPTS, generate(directory, PROMPTS, TOKENS))
    row = row_of(llm, "weights")
    assert (
        row[1] == "8 bits, else float32, from GGUF (BF16, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)"
    )
    assert row[2] == "as stored; 6 matrices are widened: its parts have several forms"


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        *((1, kind) for kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)),
        (2, Kind.Q4_1),
        *(pytest.param(2, kind, marks=pytest.mark.slow) for kind in (Kind.Q4_0, Kind.Q8_0)),
    ],
)
def test_stored_types_are_held(kind: Kind, ranks: int, tmp_path: Path) -> None:
    """Matrices and an embedding that is the head too; queries and keys in another order."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    kinds = {**dict.fromkeys(names, kind), "embed_tokens": Kind.Q8_0}
    sizes = {"tie_word_embeddings": True, "intermediate_size": 128, "vocab_size": 128}
    directory = write_checkpoint("llama", tmp_path / "model", **sizes)
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", kinds)
    save_file(dequantised(directory, kinds), directory / "model.safetensors", {"format": "pt"})
    expected = generate(directory, PROMPTS, TOKENS)
    llm = check_parity(file, PROMPTS, expected, tensor_parallel_size=ranks)
    if ranks == 1:
        model = llm.engine.core.runner.model
        assert model.embedding is model.head and isinstance(model.head, Levels)
    row = row_of(llm, "weights")
    assert row[2] == "as stored" and "float32" in row[1]
    llm.engine.core.close()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3_scales_frequencies_by_a_tensor(factor: float, tmp_path: Path) -> None:
    rope = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
    rope |= {"original_max_position_embeddings": 8192, "rope_theta": 5e5, "factor": factor}
    directory = write_checkpoint("llama", tmp_path / "model", rope_parameters=rope)
    factors = llama3_factors(16, 5e5, factor)
    assert 1.0 in factors and factor in factors
    file = tmp_path / "model.gguf"
    write_gguf(directory, file, "llama", facts=lambda w: w.add_tensor("rope_freqs.weight", factors))
    assert read_spec(file).rope == read_spec(directory).rope
    factors[-1] = 3.0
    write_gguf(directory, file, "llama", facts=lambda w: w.add_tensor("rope_freqs.weight", factors))
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight that are not Llama 3's"):
        read_spec(file)


def test_a_directory_with_one_file_stands_for_it(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path / "model")
    expected = generate(directory, PROMPTS, TOKENS)
    alone = tmp_path / "alone"
    alone.mkdir()
    write_gguf(directory, alone / "model.gguf", "llama")
    check_parity(alone, PROMPTS, expected)
    with pytest.raises(ConfigError, match="--load-format safetensors"):
        make(alone / "model.gguf", load_format="safetensors")
    shutil.copy(alone / "model.gguf", directory)
    check_parity(directory, PROMPTS, expected)  # safetensors first
    llm = check_parity(directory, PROMPTS, expected, load_format="gguf")
    assert llm.engine.core.info.model_path == str(directory / "model.gguf")
    shutil.copy(alone / "model.gguf", alone / "again.gguf")
    with pytest.raises(ConfigError, match=r"several GGUF files; name one of again\.gguf, model"):
        make(alone)
    (directory / "model.gguf").unlink()
    with pytest.raises(ConfigError, match=r"--load-format gguf: .* is no GGUF file"):
        make(directory, load_format="gguf")


def test_ranks_read_their_parts(tmp_path: Path) -> None:
    """Any rows and columns of a tensor are those of the whole."""
    kinds = {"k_proj": Kind.Q8_0, "o_proj": Kind.Q4_1}
    directory = write_checkpoint("llama", tmp_path / "model")
    tensors = GgufTensors(write_gguf(directory, tmp_path / "model.gguf", "llama", kinds))
    whole = dequantised(directory, kinds)
    assert tensors.names == whole.keys()
    for name, part in (
        ("k_proj", (slice(16, 32), slice(0, 64))),
        ("o_proj", (slice(3, 64), slice(32, 64))),
    ):
        name = f"model.layers.1.self_attn.{name}.weight"
        for rows in (5, 1000):
            for place, values in tensors.pieces(name, rows, part):
                assert len(values) <= rows and torch.equal(values, whole[name][place, part[1]])
        stored = gguf.dequantize(
            tensors.blocks(name, part[0]), gguf.GGMLQuantizationType[tensors.kind(name)]
        )
        assert torch.equal(torch.from_numpy(stored), whole[name][part[0]])


def change(writer: gguf.GGUFWriter, key: str, value: int) -> None:
    writer.kv_data[0][key].value = value


REFUSED: dict[str, tuple[Any, str]] = {
    "experts": (lambda w: w.add_expert_count(4), "has 4 experts, which of llama are read"),
    "part": (lambda w: w.add_uint16("split.count", 3), "is one of several parts"),
    "key": (lambda w: w.add_logit_scale(2.0), "sets llama.logit_scale to 2.0"),
    "causal": (lambda w: w.add_causal_attention(False), "llama.attention.causal to False"),
    "sections": (
        lambda w: w.add_rope_dimension_sections([4, 4, 0, 0]),
        "sets llama.rope.dimension_sections to",
    ),
    "scaling": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        "asks for RoPE type 'longrope'",
    ),
    "values": (lambda w: change(w, "llama.attention.value_length", 8), "of unequal sizes"),
    "partial": (lambda w: change(w, "llama.rope.dimension_count", 8), "sets partial_rotary_factor"),
    "tensor": (
        lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", llama3_factors(16, 5e5, 8.0)),
        r"has a tensor blk.0.ffn_gate_inp.weight \(1 such\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case: str, tmp_path: Path) -> None:
    facts, message = REFUSED[case]
    directory = write_checkpoint("llama", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", facts=facts)
    with pytest.raises(ConfigError, match=message):
        choose_spec(file, ModelConfig(model=str(file)))


def test_keys_that_change_nothing_are_read(tmp_path: Path) -> None:
    def facts(writer: gguf.GGUFWriter) -> None:
        writer.add_causal_attention(True)
        writer.add_logit_scale(1.0)
        writer.add_residual_scale(0.0)
        writer.add_rope_scaling_attn_factors(1.0)
        writer.add_expert_shared_count(0)
        writer.add_clamp_kqv(0.0)

    directory = write_checkpoint("llama", tmp_path / "model")
    found = [
        read_spec(write_gguf(directory, tmp_path / "model.gguf", "llama", facts=each))
        for each in (facts, lambda _: None)
    ]
    assert found[0] == found[1]


def test_an_architecture_or_a_form_that_is_not_read(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path / "model")
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="is of architecture 'mamba'; of GGUF files kvserve"):
        read_spec(file)
    write_gguf(directory, file, "llama")
    with pytest.raises(ConfigError, match="no GGUF into them"):
        choose_spec(file, ModelConfig(model=str(file), model_impl="transformers"))


def test_what_ends_a_turn_and_how_to_sample(tmp_path: Path) -> None:
    def facts(writer: gguf.GGUFWriter) -> None:
        writer.add_eot_token_id(7)
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)

    directory = write_checkpoint("llama", tmp_path / "model")
    file = write_gguf(directory, tmp_path / "model.gguf", "llama", facts=facts)
    found = read_generation_config(file, read_spec(file))
    assert found.eos_token_ids == [1, 7]
    assert found.sampling == {"temperature": 0.6, "top_k": 20}
    beside = {"temperature": 0.2, "top_p": 0.9, "eos_token_id": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(beside))
    found = read_generation_config(file, read_spec(file))
    assert found.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 20}
    assert found.eos_token_ids == [1, 7], "the file knows how its turns end"
