"""GGUF files of mixtures of experts and of layers with states, made by the rules of llama.cpp's
converter, beside the checkpoints that they were made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import pre_tokenizers

from kvserve.engine.gguf.tensors import GgufTensors
from kvserve.engine.models.delta_layers import DeltaTransformer
from kvserve.log import ConfigError
from tests.checkpoints import edited_tensors, generate, random_prompts, write_checkpoint
from tests.engine.models.decoding import check_parity, make, row_of, tokens
from tests.engine.models.hybrids import write_hybrid
from tests.engine.models.test_hybrids_quantized import logits_of
from tests.gguf_files import Kind, dequantised, write_gguf

PROMPTS, TOKENS = random_prompts([5, 90, 1, 33]), 24
FAMILIES = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
BY_MODULES = {"lfm2": "lfm2", "lfm2moe": "lfm2_moe"}
SHAPE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    # Three value heads of a key head, and whole blocks in each.
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 32},
    **{"linear_key_head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64},
    **{"shared_expert_intermediate_size": 64, "mlp_only_layers": [], "num_experts": 4},
}
MATRICES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "in_proj_qkvz"),
    "out_proj",
)


def written(family: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint of a family with states."""
    if family in BY_MODULES:
        of_all: dict[str, Any] = {"tie_word_embeddings": True, "moe_intermediate_size": 64}
        return write_hybrid(BY_MODULES[family], directory, **{**of_all, **changes})
    kind = FAMILIES[family]
    fields = SHAPE if kind != "qwen3_5_text" else {n: x for n, x in SHAPE.items() if "exp" not in n}
    return write_hybrid(kind, directory, **{**fields, **changes})


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3next as it was first"])
def test_layers_with_states(family: str, tmp_path: Path) -> None:
    family, _, first = family.partition(" ")
    directory = written(family, tmp_path / "model")
    file = write_gguf(directory, tmp_path / "m.gguf", family, side_by_side=bool(first))
    llm = make(file)
    model = llm.engine.core.runner.model
    assert isinstance(model, DeltaTransformer)
    assert model.spec.num_layers == len(model.spec.states) == 2
    torch.testing.assert_close(logits_of(llm), logits_of(make(directory)), atol=1e-4, rtol=0.0)


@pytest.mark.compiler
@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_beside_stored_types_that_are_held(family: str, kind: Kind, tmp_path: Path) -> None:
    """Experts one by one, heads in another order, along inputs too."""
    kinds = dict.fromkeys(MATRICES, kind)
    directory = written(family, tmp_path / "model")
    file = write_gguf(directory, tmp_path / "m.gguf", family, kinds)
    stored = dequantised(directory, kinds)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    llm = make(file)
    held, said = row_of(llm, "weights")[1:]
    assert held.startswith("4 bits" if kind is Kind.Q4_1 else "8 bits") and said == "as stored"
    torch.testing.assert_close(logits_of(llm), logits_of(make(directory)), atol=5e-3, rtol=0.0)


@pytest.mark.parametrize("family", BY_MODULES)
def test_modules_are_given_numbers(family: str, tmp_path: Path) -> None:
    kinds = dict.fromkeys((*MATRICES, "in_proj", "w1", "w2", "w3"), Kind.Q8_0)
    directory = written(family, tmp_path / "model")
    llm = make(write_gguf(directory, tmp_path / "m.gguf", family, kinds))
    wide = "widened when read: its accuracy, not its size"
    assert row_of(llm, "weights")[1:] == ("float32, from GGUF (F32, Q8_0)", wide)
    save_file(dequantised(directory, kinds), directory / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits_of(llm), logits_of(make(directory)), atol=1e-4, rtol=0.0)


def test_modules_run_files_that_our_layers_do_not(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope |= {"rope_theta": 1e4, "partial_rotary_factor": 0.5}
    directory = written("qwen35", tmp_path / "model", rope_parameters=rope)
    llm = make(write_gguf(directory, tmp_path / "m.gguf", "qwen35"))
    assert row_of(llm, "layers")[1] == "transformers"
    torch.testing.assert_close(logits_of(llm), logits_of(make(directory)), atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0, Kind.F16])
def test_mixtures_of_experts(kind: Kind, tmp_path: Path) -> None:
    kinds = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), kind)
    changes: dict[str, Any] = {"mlp_only_layers": [], "moe_intermediate_size": 64}
    directory = write_checkpoint("qwen3-moe", tmp_path / "model", **changes)
    file = write_gguf(directory, tmp_path / "m.gguf", "qwen3moe", kinds)
    save_file(dequantised(directory, kinds), directory / "model.safetensors", {"format": "pt"})
    check_parity(file, PROMPTS, generate(directory, PROMPTS, TOKENS))


LLAMA_CPP = json.loads(Path(__file__).with_name("llama_cpp_tokens.json").read_text())
"""What llama.cpp answers with the files of ``for_llama_cpp``, and which version: its server's
``/completion`` of each prompt at temperature 0 and with ignore_eos; its cache is in float32."""


def for_llama_cpp(family: str, directory: Path) -> Path:
    """A file of numpy's numbers, with a tokenizer of bytes, which llama.cpp wants."""
    sizes: dict[str, Any] = {"vocab_size": 259, "head_dim": 16 if family in BY_MODULES else 64}
    if family == "qwen3moe":
        experts = {"mlp_only_layers": [], "moe_intermediate_size": 64}
        write_checkpoint("qwen3-moe", directory / "model", **sizes, **experts)
    else:
        written(family, directory / "model", **sizes)
    rng = np.random.default_rng(0)
    with edited_tensors(directory / "model") as stored:
        for name in sorted(stored):
            numbers = torch.from_numpy(rng.standard_normal(tuple(stored[name].shape))).float()
            plain = family == "qwen3moe" or family in BY_MODULES
            from_one = plain or name.endswith("linear_attn.norm.weight")
            of_norm = name.endswith("norm.weight")
            stored[name] = numbers * (0.2 if numbers.dim() > 1 else 0.1) + (of_norm and from_one)

    words = "lfm2" if family in BY_MODULES else "qwen35" if "35" in family else "qwen2"

    def facts(writer: gguf.GGUFWriter) -> None:
        del writer.kv_data[0]["tokenizer.ggml.tokens"]
        tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ab"]
        writer.add_token_list(tokens)
        writer.add_token_types([3, 3] + [1] * 257)
        writer.add_token_merges(["a b"])
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(words)
        writer.add_add_bos_token(False)

    return write_gguf(directory / "model", directory / "m.gguf", family, facts=facts)


@pytest.mark.parametrize("family", LLAMA_CPP["tokens"])
def test_answers_are_those_of_llama_cpp(family: str, tmp_path: Path) -> None:
    """So the files above are as its converter writes them."""
    llm = make(for_llama_cpp(family, tmp_path))
    for prompt, wanted in zip(LLAMA_CPP["prompts"], LLAMA_CPP["tokens"][family], strict=True):
        # Its ignore_eos keeps the end from being chosen.
        assert tokens(llm, [prompt], len(wanted), logit_bias={1: -100.0}) == [wanted]


def drop(key: str) -> Callable[[gguf.GGUFWriter], None]:
    return lambda writer: writer.kv_data[0].__delitem__(key)


def put(key: str, value: Any) -> Callable[[gguf.GGUFWriter], None]:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0][key].value = value

    return change


def scaled(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4)


def merged(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.ffn_gate_up_exps.weight", np.zeros((4, 128, 64), np.float32))


REFUSED: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None], str]] = {
    "no keys of states": ("qwen35", drop("qwen35.ssm.group_count"), "does not set qwen35.ssm.gr"),
    "no experts": ("qwen35moe", drop("qwen35moe.expert_count"), "does not set qwen35moe.expert_c"),
    "heads": ("qwen35", put("qwen35.ssm.inner_size", 191), "ssm.inner_size 191 for 6 heads"),
    "sections": (
        "qwen35",
        put("qwen35.rope.dimension_sections", [16, 8, 8, 0]),
        r"rope.dimension_sections to \[16, 8, 8, 0\], which is not read",
    ),
    "merged": ("qwen35moe", merged, "has a tensor blk.0.ffn_gate_up_exps.weight"),
    "routing": (
        "qwen35moe",
        lambda w: w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
        "sets qwen35moe.expert_gating_func to 2",
    ),
    "weights of experts": (
        "qwen35moe",
        lambda w: w.add_expert_weights_norm(False),
        "sets qwen35moe.expert_weights_norm to False",
    ),
    "other counts": (
        "qwen35moe",
        put("qwen35moe.expert_count", 3),
        r"experts.3.down_proj.weight \(12 such",
    ),
    "scaled": ("qwen3next", scaled, "no GGUF into them"),
    "windows": ("lfm2", lambda w: w.add_sliding_window(4), "has windows, or rotates"),
    "heads of layers": (
        "lfm2",
        put("lfm2.attention.head_count_kv", [0, 2, 1, 0]),
        r"head_count_kv to \[0, 2, 1, 0\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_named(case: str, tmp_path: Path) -> None:
    family, facts, message = REFUSED[case]
    directory = written(family, tmp_path / "model")
    file = write_gguf(directory, tmp_path / "m.gguf", family, facts=facts)
    with pytest.raises(ConfigError, match=message):
        make(file)


@pytest.mark.compiler
def test_heads_that_fill_no_blocks_are_named(tmp_path: Path) -> None:
    directory = written("qwen35", tmp_path / "model", linear_value_head_dim=16)
    file = write_gguf(directory, tmp_path / "m.gguf", "qwen35", {"out_proj": Kind.Q8_0})
    with pytest.raises(ConfigError, match=r"blk.0.ssm_out.weight in blocks of 32, which its heads"):
        make(file)


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    def facts(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.kv_data[0]["qwen35.block_count"].value += 1
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.zeros((64, 128), np.float32))
        writer.add_tensor("blk.4.attn_q.weight", np.zeros((128, 64), np.float32))

    directory = written("qwen35", tmp_path / "model")
    wanted = tokens(make(directory), PROMPTS[:2], 8)
    llm = make(write_gguf(directory, tmp_path / "m.gguf", "qwen35", facts=facts))
    assert len(llm.engine.core.runner.model.layers) == 4
    assert tokens(llm, PROMPTS[:2], 8) == wanted


def test_blocks_across_heads_are_widened_first(tmp_path: Path) -> None:
    """K-quants have blocks of 256 numbers, more than a head has: along inputs numbers move, not
    blocks."""
    sizes = {"linear_num_value_heads": 8, "linear_value_head_dim": 32}
    directory = written("qwen35", tmp_path / "model", **sizes)
    drawn = np.random.default_rng(0).integers(0, 256, (64, 144), np.uint8)
    drawn[:, :4] = np.array([1e-2, 1e-3], np.float16).view(np.uint8)  # the block's two scales
    file = tmp_path / "m.gguf"

    def facts(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ssm_out.weight", drawn, raw_dtype=Kind.Q4_K)

    write_gguf(directory, file, "qwen35", facts=facts, without="layers.0.linear_attn.out_proj")
    stored = gguf.dequantize(drawn, Kind.Q4_K).reshape(64, 4, 2, 32)
    wanted = torch.from_numpy(stored.swapaxes(1, 2).reshape(64, 256).copy())
    found = GgufTensors(file).tensor("model.layers.0.linear_attn.out_proj.weight")
    assert torch.equal(found, wanted)
    assert tokens(make(file), PROMPTS[:1], 4)
