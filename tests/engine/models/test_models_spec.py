"""config.json files as the papers' models have them, before and after transformers 5."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.engine.models.spec import ModelSpec, RopeSpec, parse_spec

LLAMA2 = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vocab_size": 32000,
}
LLAMA31 = {
    **LLAMA2,
    "attention_bias": False,
    "mlp_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL = {
    **LLAMA2,
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
NEMO = {
    **MISTRAL,
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 1024000,
    "num_hidden_layers": 40,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 131072,
}
QWEN25 = {
    **LLAMA2,
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3 = {
    **QWEN25,
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_size": 2560,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
INTERNLM25 = {
    **LLAMA2,
    "architectures": ["InternLM2ForCausalLM"],
    "bias": False,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
    "rope_theta": 1000000,
    "vocab_size": 92544,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (LLAMA2, {"num_kv_heads": 32, "head_dim": 128, "dtype": "float16", "max_position": 4096}),
        (LLAMA31, {"eos_token_ids": (128001, 128008, 128009), "max_position": 131072}),
        (MISTRAL, {"window": 4096, "max_position": 32768}),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, {"window": 4096}),
        (NEMO, {"window": None, "head_dim": 128, "num_heads": 32}),
        (QWEN25, {"window": None, "qkv_bias": True, "head_dim": 128, "max_position": 32768}),
        (
            {**QWEN25, "use_sliding_window": True},
            {"window": None},
        ),  # from layer 28 on: there is none
        ({**QWEN25, "use_sliding_window": True, "max_window_layers": 27}, {"window": 131072}),
        ({**QWEN3, "use_sliding_window": True}, {"window": None}),
        (
            {**QWEN25, "use_sliding_window": True, "layer_types": ["full_attention"]},
            {"window": None},
        ),
        ({**QWEN25, "rope_scaling": YARN}, {"max_position": 131072}),
        (QWEN3, {"qk_norm": True, "head_dim": 128, "tied_embeddings": True}),
        ({**QWEN3, "rope_scaling": YARN}, {"max_position": 131072}),
        (INTERNLM25, {"max_position": 65536, "num_kv_heads": 8}),
        ({**LLAMA2, "num_key_value_heads": None}, {"num_kv_heads": 32}),
        ({**LLAMA2, "rope_scaling": {"type": "linear", "factor": 4}}, {"max_position": 16384}),
    ],
)
def test_fields(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = parse_spec(raw, "config.json")
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (LLAMA2, RopeSpec(10000.0, "default", 4096)),
        (
            LLAMA31,
            RopeSpec(
                500000.0,
                "llama3",
                8192,
                {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
            ),
        ),
        (INTERNLM25, RopeSpec(1000000.0, "dynamic", 32768, {"factor": 2.0})),
        ({**QWEN25, "rope_scaling": YARN}, RopeSpec(1000000.0, "yarn", 32768, {"factor": 4.0})),
        (
            {**QWEN25, "rope_theta": None, "rope_parameters": {"rope_theta": 5.0, **YARN}},
            RopeSpec(5.0, "yarn", 32768, {"factor": 4.0}),
        ),
        (
            {**QWEN25, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            RopeSpec(1000000.0, "yarn", 32768, {"factor": 2.0}),
        ),
    ],
)
def test_rope(raw: dict[str, Any], expected: RopeSpec) -> None:
    assert parse_spec(raw, "config.json").rope == expected


@pytest.mark.parametrize(("prompt", "shareable"), [(1, 32768), (32768, 32768), (32769, 0)])
def test_what_dynamic_rope_lets_prompts_share(prompt: int, shareable: int) -> None:
    spec: ModelSpec = parse_spec(INTERNLM25, "config.json")
    assert spec.num_shareable(prompt) == shareable
