"""config.json files as the papers' models have them, before and after transformers 5."""

from __future__ import annotations

from typing import Any

import pytest

from kvserve.engine.models.families import ExpertSpec
from kvserve.engine.models.spec import ModelSpec, RopeSpec, architecture_of, parse_spec

LLAMA2 = {
    "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
LLAMA31 = {
    **LLAMA2, "attention_bias": False, "mlp_bias": False,
    "eos_token_id": [128001, 128008, 128009], "intermediate_size": 14336,
    "max_position_embeddings": 131072, "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "torch_dtype": "bfloat16", "vocab_size": 128256,
}  # fmt: skip
MISTRAL = {
    **LLAMA2, "architectures": ["MistralForCausalLM"], "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_key_value_heads": 8, "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
NEMO = {
    **MISTRAL, "head_dim": 128, "hidden_size": 5120, "max_position_embeddings": 1024000,
    "num_hidden_layers": 40, "rope_theta": 1000000.0, "sliding_window": None,
    "vocab_size": 131072,
}  # fmt: skip
QWEN25 = {
    **LLAMA2, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 32768, "max_window_layers": 28,
    "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072,
    "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = {
    **QWEN25, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_size": 2560, "max_position_embeddings": 40960, "num_attention_heads": 32,
    "num_hidden_layers": 36, "num_key_value_heads": 8, "sliding_window": None,
    "tie_word_embeddings": True,
}  # fmt: skip
INTERNLM25 = {
    **LLAMA2, "architectures": ["InternLM2ForCausalLM"], "bias": False,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_key_value_heads": 8,
    "rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 1000000,
    "vocab_size": 92544,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
    "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8, "sliding_window": None,
}  # fmt: skip
MIXTRAL = {
    **MISTRAL, "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2,
    "num_local_experts": 8, "sliding_window": None,
}  # fmt: skip
GRANITE = {
    **LLAMA2, "architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0, "logits_scaling": 16.0, "residual_multiplier": 0.22,
}  # fmt: skip
SMOLLM3 = {**LLAMA2, "architectures": ["SmolLM3ForCausalLM"], "use_sliding_window": False}
PHI3 = {**LLAMA2, "architectures": ["Phi3ForCausalLM"], "sliding_window": 2047}
GEMMA2 = {
    "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
    "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 4608, "intermediate_size": 36864,
    "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 46,
    "num_key_value_heads": 16, "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0, "sliding_window": 4096, "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2, "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
    "eos_token_id": [1, 106], "final_logit_softcapping": None, "hidden_size": 1152,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn",
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": 201088,
}  # fmt: skip
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
            {**QWEN25, "use_sliding_window": True, "layer_types": ["full_attention"] * 28},
            {"window": None},
        ),
        (
            {**QWEN25, "rope_scaling": YARN},
            {"max_position": 131072, "rope": RopeSpec(1000000.0, "yarn", 32768, {"factor": 4.0})},
        ),
        (QWEN3, {"qk_norm": "head", "head_dim": 128, "tied_embeddings": True}),
        ({**QWEN3, "rope_scaling": YARN}, {"max_position": 131072}),
        (QWEN3_MOE, {"experts": ExpertSpec(128, 8, 768, True), "qk_norm": "head", "window": None}),
        (
            {**QWEN3_MOE, "decoder_sparse_step": 18, "mlp_only_layers": [17]},
            {"experts": ExpertSpec(128, 8, 768, True, frozenset({*range(36)} - {35}))},
        ),
        ({**QWEN3_MOE, "use_sliding_window": True, "sliding_window": 4096}, {"window": 4096}),
        (MIXTRAL, {"experts": ExpertSpec(8, 2, 14336, True), "window": None}),
        ({**MIXTRAL, "sliding_window": 4096}, {"window": 4096}),
        (
            GRANITE,
            {
                **{"embedding_scale": 12.0, "logits_divisor": 16.0, "residual_scale": 0.22},
                "query_scale": 0.0078125 * 128**0.5,
            },
        ),
        (SMOLLM3, {"without_rope": frozenset(range(3, 32, 4)), "window": None}),
        (PHI3, {"window": 2047}),
        ({**PHI3, "sliding_window": None}, {"window": None}),
        (
            GEMMA2,
            {
                **{"window": 4096, "windowed": frozenset(range(0, 46, 2)), "soft_cap": 50.0},
                **{"logits_cap": 30.0, "norms": "both", "tied_embeddings": True},
                **{"query_scale": (256 / 144) ** 0.5, "embedding_scale": 4608**0.5},
            },
        ),
        (
            GEMMA3,
            {
                **{"window": 512, "windowed": frozenset(n for n in range(26) if n % 6 != 5)},
                **{"soft_cap": 0.0, "logits_cap": 0.0, "qk_norm": "head", "query_scale": 1.0},
                "rope": RopeSpec(1000000.0, "default", 32768),
                "rope_of_windows": RopeSpec(10000.0, "default", 32768),
            },
        ),
        (
            GPT_OSS,
            {
                **{"window": 128, "windowed": frozenset(range(0, 24, 2)), "sinks": True},
                **{"experts": ExpertSpec(32, 4, 2880, True, limit=7.0, alpha=1.702)},
                **{"max_position": 131072, "qkv_bias": True, "out_bias": True},
                "rope": RopeSpec(
                    *(150000.0, "yarn", 4096),
                    {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": 0.0},
                ),
            },
        ),
        (INTERNLM25, {"max_position": 65536, "num_kv_heads": 8}),
        ({**LLAMA2, "num_key_value_heads": None}, {"num_kv_heads": 32}),
        ({**LLAMA2, "rope_scaling": {"type": "linear", "factor": 4}}, {"max_position": 16384}),
        (LLAMA2, {"rope": RopeSpec(10000.0, "default", 4096)}),
        (
            LLAMA31,
            {
                "rope": RopeSpec(
                    *(500000.0, "llama3", 8192),
                    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                )
            },
        ),
        (INTERNLM25, {"rope": RopeSpec(1000000.0, "dynamic", 32768, {"factor": 2.0})}),
        (
            {**QWEN25, "rope_theta": None, "rope_parameters": {"rope_theta": 5.0, **YARN}},
            {"rope": RopeSpec(5.0, "yarn", 32768, {"factor": 4.0})},
        ),
        (
            {**QWEN25, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope": RopeSpec(1000000.0, "yarn", 32768, {"factor": 2.0})},
        ),
    ],
)
def test_fields(raw: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = parse_spec(raw, "config.json")
    assert {name: getattr(spec, name) for name in expected} == expected


@pytest.mark.parametrize(("prompt", "shareable"), [(1, 32768), (32768, 32768), (32769, 0)])
def test_what_dynamic_rope_lets_prompts_share(prompt: int, shareable: int) -> None:
    spec: ModelSpec = parse_spec(INTERNLM25, "config.json")
    assert spec.num_shareable(prompt) == shareable


@pytest.mark.parametrize(
    ("model_type", "architecture"),
    [
        ("llama", "LlamaForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("internlm2", "InternLM2ForCausalLM"),
        ("nothing", "(none)"),
    ],
)
def test_a_model_type_stands_for_architectures(model_type: str, architecture: str) -> None:
    """As configs have it that transformers made of a GGUF file."""
    assert architecture_of({"model_type": model_type}) == architecture
    assert architecture_of({"model_type": model_type, "architectures": ["A"]}) == "A"


def test_a_config_without_architectures_is_read() -> None:
    raw = {**LLAMA31, "architectures": None, "model_type": "llama"}
    assert parse_spec(raw, "x") == parse_spec(LLAMA31, "x")
