"""Random tiny checkpoints of models some of whose layers keep states, one of each family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from tests.checkpoints import Generated
from tests.engine.models import decoding

SHAPE: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    **{"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
_THREE_OF_FOUR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
_DELTA: dict[str, Any] = {
    **{"layer_types": _THREE_OF_FOUR, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
}
_MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2},
    **{"mamba_expand": 2, "mamba_d_conv": 4},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_next": {**_DELTA, **_EXPERTS, "mlp_only_layers": [0, 1, 2, 3]},
    "olmo_hybrid": {**_DELTA, "rope_parameters": None},
    "granitemoehybrid": {
        **_MAMBA,
        **{"layer_types": _THREE_OF_FOUR, "num_local_experts": 0, "shared_intermediate_size": 96},
        **{"position_embedding_type": "rope", "attention_multiplier": 0.25, "mamba_chunk_size": 64},
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 64},
    "nemotron_h": {
        **{"layer_types": ["linear_attention", "mlp", "full_attention", "linear_attention"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
        **{"chunk_size": 64, "conv_kernel": 4, "expand": 2, "layer_norm_epsilon": 1e-5},
    },
    "lfm2": {
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
        **{"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
    },
    "lfm3": {
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
        "norm_eps": 1e-5,
    },
    "lfm2_moe": {
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3},
        **{**_EXPERTS, "num_dense_layers": 1, "norm_eps": 1e-5},
    },
    "kimi_linear": {
        **{"layer_types": _THREE_OF_FOUR, "linear_num_heads": 4, "linear_head_dim": 16},
        **{"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12},
        **{"q_lora_rank": None, "num_key_value_heads": 4, "mlp_layer_types": ["dense"] * 4},
        **_EXPERTS,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 64},
}

OURS = {"qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"}
"""Those that run on layers of our own."""


def write_hybrid(kind: str, directory: Path, **changes: Any) -> Path:
    """A checkpoint of one of ``FAMILIES``."""
    config = AutoConfig.for_model(kind, **{**SHAPE, **FAMILIES[kind], **changes})
    return decoding.write(AutoModelForCausalLM, config, directory)


@torch.no_grad()
def expected(
    directory: Path, prompts: Sequence[Sequence[int]], count: int, chunk: int = 512
) -> list[Generated]:
    """What transformers goes on with, each prompt alone: in calls of ``chunk`` tokens, then of
    one. (A batch with pads would be wrong: they enter the states. Bamba has to be told positions:
    without, its layers count those of a call from 0, transformers 5.23.0.)"""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        calls = list(torch.tensor([prompt]).split(chunk, dim=1))
        logits, rows, tokens = torch.empty(0), list[Tensor](), list[int]()
        while len(tokens) < count:
            for call in calls:
                at = torch.arange(call.shape[1])[None] + cache.get_seq_length()
                given = {"past_key_values": cache, "use_cache": True, "position_ids": at}
                logits = model(input_ids=call, **given).logits[0, -1]
            rows.append(logits)
            tokens.append(int(logits.argmax()))
            calls = [torch.tensor([tokens[-1:]])]
        found.append(Generated(tokens, torch.stack(rows)))
    return found
