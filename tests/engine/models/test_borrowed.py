"""Decoders on transformers' modules: the tokens of transformers itself, and what is refused."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kvserve.config import ModelConfig
from kvserve.engine.models.borrowed import Borrowed
from kvserve.engine.models.implementation import choose_spec
from kvserve.log import ConfigError
from tests.checkpoints import edit_config, edited_tensors, write_checkpoint
from tests.engine.models import decoding
from tests.engine.models.decoding import GQA, PROMPTS, SHAPE, make, tokens

WINDOWED = {**GQA, "sliding_window": 20}
MODELS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gpt2", "gpt_neox", "opt"), SHAPE),
    **dict.fromkeys(
        (
            *("apertus", "arcee", "bitnet", "cohere", "ernie4_5", "gemma", "glm", "glm4"),
            *("nemotron", "olmo", "phi", "seed_oss", "ernie4_5_moe", "flex_olmo", "glm4_moe"),
            *("granitemoe", "minimax_m2", "olmoe", "phimoe", "qwen2_moe", "solar_open"),
        ),
        GQA,
    ),
    **dict.fromkeys(
        (
            *("afmoe", "cohere2", "cwm", "exaone4", "exaone_moe", "gemma2", "gemma3_text"),
            *("gpt_oss", "olmo3", "starcoder2"),
        ),
        WINDOWED,
    ),
}
MODELS["gpt_oss"] = {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2}
QUICK = {"gemma2", "gpt2", "gpt_oss"}


def write(kind: str, directory: Path, **changes: Any) -> Path:
    config = AutoConfig.for_model(kind, **{**MODELS.get(kind, GQA), **changes})
    return decoding.write(AutoModelForCausalLM, config, directory)


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS],
)
def test_the_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    wanted = decoding.expected(AutoModelForCausalLM, write(kind, tmp_path))
    how = {"model_impl": "transformers"}
    llm = make(tmp_path, max_num_batched_tokens=16, max_num_seqs=4, **how)
    assert isinstance(llm.engine.core.runner.model, Borrowed)
    assert tokens(llm) == wanted
    assert tokens(make(tmp_path, **how)) == wanted


def test_files_are_read_as_for_native_layers(tmp_path: Path) -> None:
    """Shards without an index, and a head of the file's own under a config that ties it."""
    write("glm4", tmp_path, tie_word_embeddings=True)
    tied = tokens(make(tmp_path))
    with edited_tensors(tmp_path) as stored:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].roll(1, 0)
    wanted = decoding.expected(AutoModelForCausalLM, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = list(load_file(file).items())
    file.unlink()
    for place in (0, 1):
        shard = tmp_path / f"model-0000{place + 1}-of-00002.safetensors"
        save_file(dict(tensors[place::2]), shard, {"format": "pt"})
    assert tokens(make(tmp_path)) == wanted != tied


def test_a_policy_keeps_what_it_keeps_on_native_layers(tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    policy = {"name": "kara", "window": 16, "buffer": 4, "protect_prompt": False, "ratio": 0.3}
    found = []
    for form in ("native", "transformers"):
        llm = make(tmp_path, policy=policy, model_impl=form)
        assert isinstance(llm.engine.core.runner.model, Borrowed) == (form == "transformers")
        found.append(tokens(llm, PROMPTS, 40))
        assert llm.stats().compactions_total >= len(PROMPTS)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "message"), [("bloom", "ALiBi"), ("mamba", "cannot hand its attention")]
)
def test_what_cannot_run_is_refused_by_name(kind: str, message: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(kind, **GQA)
    name = type(AutoModelForCausalLM.from_config(config)).__name__
    raw = {**config.to_dict(), "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(raw, default=str))
    with pytest.raises(ConfigError, match=message) as error:
        make(tmp_path, load_format="dummy")
    assert name in str(error.value)


def test_layers_that_differ_are_a_line(tmp_path: Path) -> None:
    """Reading one number of them was a traceback."""
    heads = {"3": {"num_attention_heads": 4}}
    config = AutoConfig.for_model("gemma4_text", per_layer_config=heads)
    config.architectures = [name := "Gemma4ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"{name}: its layers differ in num_attention_heads"):
        choose_spec(tmp_path, ModelConfig(model=str(tmp_path)))


@pytest.mark.parametrize("field", ["hidden_size", "num_attention_heads", "rope_parameters"])
def test_a_config_that_nobody_thought_of_is_a_line(field: str, tmp_path: Path) -> None:
    write("glm4", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for value in ([64, 64], {"0": 64}, "many", None, -1, 0):
        (tmp_path / "config.json").write_text(json.dumps({**raw, field: value}))
        with suppress(ConfigError):
            choose_spec(tmp_path, ModelConfig(model=str(tmp_path)))


def test_refusals_before_anything_is_loaded(tmp_path: Path) -> None:
    write("glm4", tmp_path)
    with pytest.raises(ConfigError, match="--tensor-parallel-size: Glm4ForCausalLM runs on trans"):
        make(tmp_path, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="pyramidinfer prunes between layers"):
        make(tmp_path, policy="pyramidinfer")
    with pytest.raises(ConfigError, match="Glm4ForCausalLM; kvserve runs"):
        make(tmp_path, model_impl="native")
    edit_config(tmp_path, layer_types=["full_attention", "linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match="layer 1 is linear_attention"):
        choose_spec(tmp_path, ModelConfig(model=str(tmp_path)))


def test_no_graph_is_captured_of_borrowed_layers(tmp_path: Path) -> None:
    write("glm4", tmp_path)
    with pytest.raises(ConfigError, match="--cudagraph-capture-sizes: transformers' modules"):
        make(tmp_path, cudagraph_capture_sizes=[1, 2])


def test_contexts_go_past_windows_but_not_past_chunks(tmp_path: Path) -> None:
    write("cohere2", tmp_path, sliding_window=40)
    assert make(tmp_path).engine.core.info.max_model_len == 512
    edit_config(tmp_path, layer_types=["chunked_attention"] * 3, attention_chunk_size=64)
    assert choose_spec(tmp_path, ModelConfig(model=str(tmp_path))).max_position == 64
