"""Every model of transformers' table of causal ones: it runs, or one line says why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from kvserve.config import ModelConfig
from kvserve.engine.models.implementation import choose_spec
from kvserve.log import ConfigError
from tests.engine.models.decoding import make, tokens
from tests.thinning import slow

QUICK = ["bart", "bert", "deepseek_v3", "gemma4", "jamba", "kimi_linear", "llama4_text", "qwen3_5"]
TABLE = [*QUICK, *slow(*(kind for kind in NAMES if kind not in QUICK))]
"""One of each way to be refused, latent attention that is served, and a wrapper that is."""
RUNS = {
    *("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    *("gpt2", "kimi_linear", "llama", "ministral3", "mistral3", "olmo_hybrid", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_5_text"),
}
FIELDS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "moe_k"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **{"num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2, "vocab_size": 128},
    **{"moe_intermediate_size": 32, "layer_types": None, "mlp_layer_types": None},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128},
    **{"num_kv_shared_layers": 0, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2},
}
"""Sizes under the names that configs have for them."""


def write_config(kind: str, directory: Path, **sizes: Any) -> str:
    """A config.json as the model's class makes it; returns the architecture that it names."""
    named = NAMES[kind]
    name = named if isinstance(named, str) else named[0]
    config = AutoConfig.for_model(kind)
    if sizes:
        text = config.get_text_config(decoder=True)
        fields = text.to_dict()
        config = type(text)(**{field: sizes[field] for field in sizes if field in fields})
    config.architectures = [name]
    config.save_pretrained(directory)
    return name


def is_one_line(error: ConfigError) -> bool:
    return str(error).startswith("--model: ") and "\n" not in str(error)


@pytest.mark.parametrize("kind", TABLE)
def test_a_config_is_served_or_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    """Nothing is loaded for that: configs are those of models of their usual sizes."""
    try:
        write_config(kind, tmp_path)
    except Exception:
        pytest.skip("its class makes no config by itself")
    model = ModelConfig(model=str(tmp_path), load_format="dummy")
    try:
        spec = choose_spec(tmp_path, model)
    except ConfigError as error:
        assert is_one_line(error) and kind not in RUNS
    else:
        assert spec.num_layers and spec.num_heads and spec.max_position


@pytest.mark.parametrize("kind", TABLE)
def test_a_small_one_runs_or_is_refused_in_a_line(kind: str, tmp_path: Path) -> None:
    try:
        write_config(kind, tmp_path, **FIELDS)
    except Exception:
        pytest.skip("its class makes no config of these sizes")
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 64}
    try:
        llm = make(tmp_path, load_format="dummy", **sizes)
    except ConfigError as error:
        assert is_one_line(error)
    else:
        assert [len(answer) for answer in tokens(llm, [[3, 4, 5], [6] * 9], 3)] == [3, 3]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        # An encoder's config of a model that may be either; it was served as if it were causal.
        ("bert", "BertSelfAttention sees later tokens, too"),
        # Its layers have keys and values, and convolutions of what the row has read.
        ("zaya", "ZayaForCausalLM: layer 0 is hybrid, not keys and"),
        # It weighs tokens.
        ("doge", "DogeAttention makes a mask of its own"),
    ],
)
def test_what_answered_otherwise_than_transformers_is_refused(
    kind: str, message: str, tmp_path: Path
) -> None:
    write_config(kind, tmp_path, **({} if kind == "zaya" else FIELDS))
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, load_format="dummy")
