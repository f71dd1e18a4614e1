"""Models that also see: their text is that of transformers, and their images are not read."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from kvserve.config import ModelConfig
from kvserve.engine.models.borrowed import Borrowed
from kvserve.engine.models.implementation import choose_spec
from kvserve.log import ConfigError
from tests.checkpoints import edited_tensors
from tests.engine.models import decoding
from tests.engine.models.decoding import GQA, make, tokens

SIGHT: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "image_size": 28},
    **{"num_attention_heads": 2, "patch_size": 14},
}
QWEN: dict[str, Any] = {
    **{"hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "depth": 1},
    **{"num_heads": 2, "patch_size": 14},
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
UNTIED = {"tie_word_embeddings": False}
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**GQA, "head_dim": 16, "sliding_window": 20, "sliding_window_pattern": 2},
        "vision_config": SIGHT,
    },
    "mistral3": {
        "text_config": {**GQA, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**SIGHT, "model_type": "pixtral", "head_dim": 16},
        **UNTIED,
    },
    "llava": {
        "text_config": {**GQA, "model_type": "llama"},
        "vision_config": {**SIGHT, "model_type": "clip_vision_model", "projection_dim": 32},
        **UNTIED,
    },
    "qwen2_5_vl": {"text_config": {**GQA, "rope_parameters": MROPE}, "vision_config": QWEN},
    "qwen3_vl": {
        "text_config": {**GQA, "head_dim": 16, "rope_parameters": MROPE},
        "vision_config": {**QWEN, "deepstack_visual_indexes": [0]},
        "tie_word_embeddings": True,
    },
    "idefics3": {"text_config": {**GQA, "model_type": "llama"}, "vision_config": SIGHT, **UNTIED},
}
BORROWED: dict[str, dict[str, Any]] = {
    "mistral3": {
        **WRAPPERS["mistral3"],
        "text_config": {
            **{**GQA, "model_type": "ministral3", "head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "original_max_position_embeddings": 16, "mscale": 1.0},
                **{"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
            },
        },
    },
    "cohere2_vision": {
        "text_config": {**GQA, "model_type": "cohere2", "sliding_window": 20},
        "vision_config": {**SIGHT, "model_type": "siglip_vision_model"},
        "tie_word_embeddings": True,
    },
    "gemma4": {
        "text_config": {
            **{**GQA, "head_dim": 16, "global_head_dim": 32, "sliding_window": 20},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
        },
        "vision_config": {
            **SIGHT,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "pooling_kernel_size": 1,
        },
        "audio_config": None,
        "tie_word_embeddings": True,
    },
    "exaone4_5": {
        "text_config": {**GQA, "model_type": "exaone4", "sliding_window": 20},
        "vision_config": QWEN,
        **UNTIED,
    },
}
"""Whose decoders run on transformers' modules."""


def write(kind: str, directory: Path, kinds: dict[str, dict[str, Any]] = WRAPPERS) -> Path:
    config = AutoConfig.for_model(kind, **kinds[kind])
    return decoding.write(AutoModelForImageTextToText, config, directory)


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    wanted = decoding.expected(AutoModelForImageTextToText, write(kind, tmp_path))
    llm = make(tmp_path)
    assert not isinstance(llm.engine.core.runner.model, Borrowed)
    assert tokens(llm) == wanted


@pytest.mark.parametrize("kind", BORROWED)
def test_decoders_on_the_modules_of_transformers(kind: str, tmp_path: Path) -> None:
    wanted = decoding.expected(AutoModelForImageTextToText, write(kind, tmp_path, BORROWED))
    llm = make(tmp_path, max_num_batched_tokens=16, max_num_seqs=4)
    model = llm.engine.core.runner.model
    assert isinstance(model, Borrowed) and "ForCausalLM" in model.spec.architecture
    assert tokens(llm) == wanted
    assert spec_of(tmp_path, raw_of(tmp_path), hf_overrides={"rms_norm_eps": 1e-3}).wrapper


def raw_of(directory: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return raw


def test_names_as_each_time_wrote_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvserve")
    write("mistral3", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    inner = re.compile(r"^(?:model\.)?language_model\.(?:model\.)?")
    found = []
    for model, head in (
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.text_model.", "lm_head."),
        ("model.", "lm_head."),
    ):
        named = {
            head + "weight" if "lm_head" in name else inner.sub(model, name): values
            for name, values in stored.items()
        }
        save_file(named, file, {"format": "pt"})
        found.append(tokens(make(tmp_path)))
    assert found == [found[0]] * 4
    assert "the text part alone is served" in caplog.text and "vision_tower" in caplog.text


def test_files_as_they_were_before_transformers_5(tmp_path: Path) -> None:
    """Gemma 3 leaves out what its class has by default, Qwen2.5-VL has no text_config, and Mistral3
    does not say that its head is its own."""
    raw: dict[str, Any] = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "vision_config": SIGHT,
        "text_config": {
            "model_type": "gemma3_text",
            **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
            **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
        },
    }
    spec = spec_of(tmp_path, raw)
    assert (spec.architecture, spec.wrapper) == ("Gemma3ForCausalLM", raw["architectures"][0])
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.eos_token_ids, spec.dtype) == (262208, (1, 106), "bfloat16")
    assert (spec.rope.kind, spec.rope.parameters["factor"]) == ("linear", 8.0)
    assert spec.rope_of_windows is not None and spec.rope_of_windows.theta == 1e4
    assert spec.tied_embeddings and spec.layers.full == tuple(range(5, 34, 6))
    flat = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **{**GQA, "rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}},
        **{"vision_config": QWEN, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
    }
    spec = spec_of(tmp_path, flat)
    assert (spec.architecture, spec.qkv_bias, spec.tied_embeddings) == (
        *("Qwen2ForCausalLM", True, True),
    )
    assert (spec.rope.kind, spec.rope.theta, spec.hidden_size) == ("default", 1e6, 64)
    write("mistral3", tmp_path)
    wanted = tokens(make(tmp_path))
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["tie_word_embeddings"], raw["text_config"]["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert tokens(make(tmp_path)) == wanted


def spec_of(directory: Path, raw: dict[str, Any], **settings: Any) -> Any:
    (directory / "config.json").write_text(json.dumps(raw))
    return choose_spec(directory, ModelConfig(model=str(directory), **settings))


def test_overrides_are_of_the_text_part_too(tmp_path: Path) -> None:
    write("mistral3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for given in ({"rope_theta": 5e5, "rope_parameters": None}, {"max_position_embeddings": 99}):
        spec = spec_of(tmp_path, raw, hf_overrides=given)
        assert spec.rope.theta == 5e5 or spec.max_position == 99


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma3", {"architectures": ["PaliGemmaForConditionalGeneration"]}, "PaliGemma"),
        ("mistral3", {"text_config": {"model_type": "bloom"}}, "BloomForCausalLM with ALiBi"),
        ("mistral3", {"text_config": {"model_type": "mamba"}}, "MambaForCausalLM"),
        ("mistral3", {"text_config": {"model_type": "nothing"}}, "nothing"),
        ("mistral3", {"text_config": [1]}, "text_config"),
        ("mistral3", {"text_config": {**GQA, "model_type": "mistral", "hidden_size": "x"}}, "hid"),
        ("mistral3", {"vision_config": "none"}, "vision_config"),
        ("llava", {"text_config": {"model_type": "qwen3_vl_moe_text"}}, "qwen3_vl_moe_text"),
    ],
)
def test_what_cannot_be_served_is_a_line(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    raw = {"architectures": [f"{kind.title()}ForConditionalGeneration"], "model_type": kind}
    with pytest.raises(ConfigError, match=message) as error:
        spec_of(tmp_path, {**raw, **WRAPPERS[kind], **changes})
    assert str(error.value).startswith("--model: ")


def test_transformers_modules_run_wrappers_of_ours_too(tmp_path: Path) -> None:
    """By the decoder's names, and with no tensor that is not in the file."""
    write("mistral3", tmp_path)
    llm = make(tmp_path, model_impl="transformers")
    assert isinstance(llm.engine.core.runner.model, Borrowed)
    assert tokens(llm) == tokens(make(tmp_path))
    with edited_tensors(tmp_path) as stored:
        del stored[next(name for name in stored if "layers.1.mlp.up_proj" in name)]
    with pytest.raises(ConfigError, match=r"--model: .*up_proj.weight \(1 missing"):
        make(tmp_path, model_impl="transformers")
