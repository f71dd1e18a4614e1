"""Broken checkpoints: one line that names the file or field; nothing half-loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvserve import LLM
from kvserve.engine.models import checkpoint, plain_storage
from kvserve.log import ConfigError
from tests.checkpoints import edit_config, edited_tensors, greedy, random_prompts, write_checkpoint
from tests.engine.models.decoding import make, row_of, tokens

INDEX = "model.safetensors.index.json"


def shard(directory: Path) -> Path:
    """Split model.safetensors in two, with an index; returns the second part."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        name = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({key: tensors[key] for key in part}, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory / name


def rename_shards(directory: Path, name: object) -> None:
    index = shard(directory).with_name(INDEX)
    found = json.loads(index.read_text())
    found["weight_map"] |= dict.fromkeys(found["weight_map"], name)
    index.write_text(json.dumps(found))


def set_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """``None`` takes it out."""
    with edited_tensors(directory) as tensors:
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor


def truncate(path: Path, size: int = 5000) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda d: shard(d).unlink(), "model-00002-of-00002.safetensors is missing"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda d: truncate(d / "model.safetensors"), "model.safetensors is damaged"),
        (lambda d: truncate(shard(d)), "model-00002-of-00002.safetensors is damaged"),
        (lambda d: truncate(shard(d).with_name(INDEX), 15), INDEX),
        *(
            (lambda d, name=name: rename_shards(d, name), f"{INDEX} names .*, no file beside it")
            for name in ("../../../x", "a/../../x", "/etc/passwd", "", "a\0b", 5, None, ["a"])
        ),
        (
            lambda d: set_tensor(d, "model.norm.weight", torch.full([64], torch.nan)),
            "model.norm.weight in .*model.safetensors holds NaN",
        ),
        (
            lambda d: set_tensor(d, "model.layers.0.self_attn.q_proj.bias", torch.ones(64)),
            r"model.safetensors has a tensor .*q_proj.bias .* that LlamaForCausalLM does not",
        ),
        (
            lambda d: set_tensor(d, "model.layers.1.mlp.up_proj.weight", None),
            "no tensor model.layers.1.mlp.up_proj.weight",
        ),
        (
            lambda d: set_tensor(d, "model.norm.weight", torch.ones(3)),
            "model.norm.weight in .*model.safetensors has shape",
        ),
        (
            # safetensors 0.8.0 writes this type, and cannot read a slice of it.
            lambda d: set_tensor(
                d, "model.norm.weight", torch.zeros(32).to(torch.uint8).view(torch.float4_e2m1fn_x2)
            ),
            "model.norm.weight in .*model.safetensors is of type F4, which is not read",
        ),
        (lambda d: edit_config(d, architectures=["JambaLikeForCausalLM"]), "JambaLikeForCausalLM"),
        (lambda d: edit_config(d, architectures=["BloomForCausalLM"]), "ALiBi"),
        (lambda d: edit_config(d, alibi=True), "ALiBi"),
        (lambda d: edit_config(d, num_hidden_layers=None), "no field 'num_hidden_layers'"),
        (lambda d: edit_config(d, hidden_size="64"), "hidden_size to '64'"),
        (lambda d: edit_config(d, num_key_value_heads=3), "8 attention heads for 3 KV heads"),
        (lambda d: edit_config(d, head_dim=9), "heads of 9 dimensions"),
        (lambda d: edit_config(d, rope_parameters={"rope_type": "longrope"}), "'longrope'"),
        (lambda d: edit_config(d, rope_parameters={"rope_type": "yarn"}), "no field 'factor'"),
        (
            lambda d: edit_config(d, rope_parameters={"full_attention": {"rope_theta": 1.0}}),
            "RoPE type",
        ),
        (
            lambda d: edit_config(d, rope_scaling={"type": "linear", "factor": 2.0}),
            "both rope_parameters and rope_scaling",
        ),
        (lambda d: edit_config(d, partial_rotary_factor=0.5), "partial_rotary_factor"),
        (lambda d: edit_config(d, attention_bias=True), "attention_bias"),
        (lambda d: edit_config(d, mlp_bias=True), "mlp_bias"),
        (lambda d: edit_config(d, architectures=["InternLM2ForCausalLM"], bias=True), "sets bias"),
        (lambda d: edit_config(d, hidden_act="gelu"), "'gelu'"),
        (lambda d: (d / "config.json").write_text("{"), "cannot read .*config.json"),
        *(
            (lambda d, text=text: (d / "config.json").write_text(text), "cannot read .*config.json")
            for text in ("[" * 10**5, '{"a":' * 10**5, '{"a": %s}' % ("9" * 5000), "", "\0", "[]")
        ),
        *(
            (lambda d, field=field: edit_config(d, **field), next(iter(field)))
            for field in (
                {"eos_token_id": {"a": 1}},
                {"eos_token_id": [[1]]},
                {"dtype": ["x"]},
                {"rms_norm_eps": float("nan")},
                {"rms_norm_eps": 10**400},
            )
        ),
        *(
            (lambda d, rope=rope: edit_config(d, rope_parameters=rope), f"RoPE.* sets {name}")
            for name, rope in (
                ("rope_theta", {"rope_type": "default", "rope_theta": 0}),
                ("rope_theta", {"rope_type": "default", "rope_theta": float("inf")}),
                ("factor", {"rope_type": "linear", "factor": 0}),
                ("factor", {"rope_type": "linear", "factor": 1e308}),
            )
        ),
        (lambda d: (d / "generation_config.json").write_text("{"), "generation_config.json"),
        (
            lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
            r"generation_config.json sets eos_token_id to .'</s>'",
        ),
        (lambda d: (d / "config.json").unlink(), "no config.json"),
    ],
)
def test_broken_checkpoints(break_it: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    break_it(directory)
    with pytest.raises(ConfigError, match=message) as refused:
        make(directory)
    message = str(refused.value)
    assert str(directory) in message and "\n" not in message


def test_shards_are_read_like_one_file(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7])
    expected = greedy(directory, prompts, 10)
    shard(directory)
    assert tokens(make(directory), prompts, 10) == expected


@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_float64_weights_are_read(dtype: str, tmp_path: Path) -> None:
    """As `model.double().save_pretrained()` writes them, with their type in config.json."""
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7])
    expected = greedy(directory, prompts, 10)
    with edited_tensors(directory) as tensors:
        tensors |= {name: tensor.double() for name, tensor in tensors.items()}
    edit_config(directory, dtype="float64")
    assert tokens(make(directory, dtype=dtype), prompts, 10) == expected


def test_shards_need_no_index(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    prompts = random_prompts([7])
    expected = greedy(directory, prompts, 10)
    last = shard(directory)
    (directory / INDEX).unlink()
    assert tokens(make(directory), prompts, 10) == expected
    save_file({"model.norm.weight": torch.ones(64)}, directory / "model-00001-of-00003.safetensors")
    with pytest.raises(ConfigError, match=r"shards model-...-of-00002 and model-...-of-00003"):
        make(directory)
    (directory / "model-00001-of-00003.safetensors").unlink()
    first = last.with_name("model-00001-of-00002.safetensors")
    for file in (first, last):
        save_file(load_file(file) | {"model.norm.weight": torch.ones(64)}, file)
    with pytest.raises(ConfigError, match=r"both have a tensor model.norm.weight"):
        make(directory)
    last.unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002.safetensors is missing;"):
        make(directory)


@pytest.mark.parametrize("kind", ["qwen3", "llama-mha-tied", "gemma2"])
def test_a_head_in_the_file_is_used_although_the_config_ties_it(kind: str, tmp_path: Path) -> None:
    """What fine-tuning has made of it (PEFT's modules_to_save); a tied one that somebody stored is
    held once, and old files have RoPE's frequencies."""
    directory = write_checkpoint(kind, tmp_path, tie_word_embeddings=True)
    prompts, table = random_prompts([7, 3]), "model.embed_tokens.weight"
    tied = greedy(directory, prompts, 10)
    with edited_tensors(directory) as tensors:
        tensors["lm_head.weight"] = tensors[table].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    llm = make(directory)
    assert llm.engine.core.runner.model.spec.tied_embeddings
    assert tokens(llm, prompts, 10) == tied
    with edited_tensors(directory) as tensors:
        tensors["lm_head.weight"] = tensors[table].roll(1, 0)
    own = greedy(directory, prompts, 10)
    assert own != tied and tokens(make(directory), prompts, 10) == own


def test_dummy_weights_need_only_a_config(tmp_path: Path) -> None:
    directory = write_checkpoint("qwen3", tmp_path)
    for file in directory.iterdir():
        if file.name != "config.json":
            file.unlink()
    edit_config(directory, quantization_config={"quant_method": "awq", "bits": 4})
    llm = make(directory, load_format="dummy")
    assert len(tokens(llm, [[3, 4, 5]], 5)[0]) == 5
    row = row_of(llm, "weights")
    assert row == ("weights", "random, 4 bits, else float32", "--load-format dummy")


def test_a_missing_tokenizer_is_named(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--tokenizer"):
        LLM(str(llama_dir))


def test_dtype_that_cannot_hold_a_weight(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    set_tensor(directory, "model.norm.weight", torch.full([64], 1e6))
    with pytest.raises(ConfigError, match=r"infinite values as float16; .*--dtype"):
        make(directory, dtype="float16")


@pytest.mark.parametrize("kind", ["llama", "internlm2"])
def test_pieces_make_the_whole(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices larger than the buffer arrive in pieces that do not divide them."""
    directory = write_checkpoint(kind, tmp_path)
    prompts = random_prompts([7])
    monkeypatch.setattr(plain_storage, "_PIECE_BYTES", 4 * 64 * 5)
    assert tokens(make(directory), prompts, 10) == greedy(directory, prompts, 10)


def test_overrides_replace_fields(tmp_path: Path) -> None:
    directory = write_checkpoint("llama", tmp_path)
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    llm = make(directory, hf_overrides={"rope_parameters": rope})
    assert llm.engine.core.info.max_model_len == 1024
    edit_config(directory, rope_parameters=rope)
    prompts = random_prompts([7])
    assert tokens(llm, prompts, 10) == greedy(directory, prompts, 10)


@pytest.mark.parametrize("most", [0, 2**20])
def test_files_are_opened_for_pieces_and_not_for_tensors(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One with thousands of tensors opens in 20 ms: experts would take hours."""
    directory = write_checkpoint("qwen3-moe", tmp_path)
    opened, of_safetensors = list[Path](), checkpoint.safe_open

    def counted(file: Path, **how: Any) -> Any:
        opened.append(file)
        return of_safetensors(file, **how)

    monkeypatch.setattr(checkpoint, "safe_open", counted)
    monkeypatch.setattr(checkpoint, "_MOST_READ", most)
    wanted = tokens(make(directory), count=4)
    stored = (directory / "model.safetensors").stat().st_size
    assert (len(opened) <= 2 + stored // most) if most else (len(opened) > 60)
    assert tokens(make(directory), count=4) == wanted
