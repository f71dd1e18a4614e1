"""Broken checkpoints: one line that names the file or field; nothing half-loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvserve import LLM, SamplingParams
from kvserve.log import ConfigError
from tests.checkpoints import greedy, random_prompts, write_checkpoint


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def shard(directory: Path) -> None:
    """Split model.safetensors in two, with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, directory / name)
        weight_map |= dict.fromkeys(part, name)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


def resize_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, directory / "model.safetensors")


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def lose_shard(directory: Path) -> None:
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lose_shard, "model-00002-of-00002.safetensors is missing"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (truncate, "model.safetensors is damaged"),
        (drop_tensor, "model.layers.1.mlp.up_proj.weight"),
        (resize_tensor, "model.norm.weight .* has shape"),
        (lambda d: edit_config(d, architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel"),
        (lambda d: edit_config(d, num_hidden_layers=None), "num_hidden_layers"),
        (lambda d: edit_config(d, rope_parameters={"rope_type": "yarn"}), "yarn"),
        (lambda d: edit_config(d, attention_bias=True), "attention_bias"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
    ],
)
def test_broken_checkpoints(break_it: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    break_it(directory)
    with pytest.raises(ConfigError, match=message) as refused:
        LLM(str(directory), skip_tokenizer_init=True)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["/no/such/place", "nowhere", "owner/unheard-of"])
def test_unknown_models(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--model: .*{name}"):
        LLM(name)


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7])
    expected = greedy(directory, prompts, 10)
    shard(directory)
    llm = LLM(str(directory), dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    assert llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids == expected[0]


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3", tmp_path)
    (directory / "model.safetensors").unlink()
    llm = LLM(str(directory), load_format="dummy", skip_tokenizer_init=True)
    (output,) = llm.generate([3, 4, 5], SamplingParams(max_tokens=5), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5


def test_a_missing_tokenizer_is_named(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        LLM(str(llama_dir))
