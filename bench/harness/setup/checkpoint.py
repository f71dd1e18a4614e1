"""The model to measure, and engines that share its weights."""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.harness.setup.policy_spec import PolicySpec
from kvserve.config import EngineConfig, ModelConfig
from kvserve.engine.compression.query_statistics import FILE, QueryStatistics, identity_of
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.frontend.tokenizer import Tokenizer
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.plan import make_plan

ENGINE_FLAGS = (
    *("dtype", "kv_cache_dtype", "max_model_len", "block_size", "max_num_batched_tokens"),
    *("swap_space", "enable_prefix_caching", "speculative_config", "continuations"),
    *("tensor_parallel_size", "trust_remote_code"),
)
"""Passed on to the engine; for a flag that is not given, the engine's default holds."""
_LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"},
    **{"max_position_embeddings": 32_768, "tie_word_embeddings": True, "vocab_size": 4096},
    **{"rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": None, "eos_token_id": None},
}
SHAPES: dict[str, dict[str, Any]] = {
    "4m": {
        **_LLAMA,
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688},
        **{"num_attention_heads": 8, "num_key_value_heads": 4},
    },
    "4m-moe": {  # of which a token uses 1.9 million weights in its layers
        **{**_LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"},
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "head_dim": 32},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "norm_topk_prob": True},
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    },
    "4m-gpt-oss": {  # as 4m-moe, with sinks, and windows in every second layer
        **{**_LLAMA, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        **{"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 128, "head_dim": 32},
        **{"num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 128},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "attention_bias": True},
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "truncate": False},
            **{"beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096},
        },
    },
    "79m": {
        **_LLAMA,
        **{"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 2048},
        **{"num_attention_heads": 12, "num_key_value_heads": 4},
    },
    "0.5b": {  # as Qwen2.5-0.5B
        **{**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        **{"num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864},
        **{"num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936},
        **{"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
    },
}


def _large(kind: str, layers: int, hidden: int, mlp: int, heads: int, **more: Any) -> Any:
    return {
        **{"architectures": [f"{kind}ForCausalLM"], "num_hidden_layers": layers},
        **{"hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads},
        **{"num_key_value_heads": 8, "max_position_embeddings": 2**17, "head_dim": 128},
        **{"vocab_size": 128256 if kind == "Llama" else 151936, **more},
    }


LARGE_SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _large("Llama", 32, 4096, 14336, 32),
    "llama-3.1-70b": _large("Llama", 80, 8192, 28672, 64),
    "qwen3-4b": _large("Qwen3", 36, 2560, 9728, 32, tie_word_embeddings=True),
    "qwen3-8b": _large("Qwen3", 36, 4096, 12288, 32),
    "qwen3-14b": _large("Qwen3", 40, 5120, 17408, 40),
    "qwen3-32b": _large("Qwen3", 64, 5120, 25600, 64),
    "qwen3-30b-a3b": {
        **_large("Qwen3Moe", 48, 2048, 6144, 32, norm_topk_prob=True, num_experts=128),
        **{"num_experts_per_tok": 8, "moe_intermediate_size": 768, "num_key_value_heads": 4},
    },
    "gpt-oss-20b": {
        **_large("GptOss", 24, 2880, 2880, 64, attention_bias=True, num_local_experts=32),
        **{"num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "head_dim": 64},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
    },
}
"""What `kvserve tune` needs of the config.json of known models."""


@dataclass(frozen=True)
class MeasuredModel:
    """Where the weights and the tokenizer come from, and the model's spec from config.json."""

    name: str
    path: Path
    tokenizer_path: str
    load_format: str
    spec: ModelSpec
    trust_remote_code: bool = False

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer_path, trust_remote_code=self.trust_remote_code)

    def settings(self, args: argparse.Namespace) -> dict[str, Any]:
        """Settings of an engine, without the policy."""
        names = *ENGINE_FLAGS, "num_gpu_blocks_override", "max_num_seqs", "seed"
        given = {name: getattr(args, name, None) for name in names}
        return {
            "model": str(self.path),
            "tokenizer": self.tokenizer_path,
            "load_format": self.load_format,
            **{name: value for name, value in given.items() if value is not None},
        }


class Engines:
    """Builds engines one after the other; all of them share the weights that the first one read."""

    def __init__(self, args: argparse.Namespace, checkpoint: MeasuredModel) -> None:
        self._settings = checkpoint.settings(args)
        self._model: Transformer | None = None

    def check(self, spec: PolicySpec, **settings: Any) -> None:
        """``ConfigError`` if the model cannot be served under this policy. Nothing is loaded."""
        config = self._config(spec, settings)
        make_plan(config).attention(config.attention_backend)

    def _config(self, spec: PolicySpec, settings: Mapping[str, Any]) -> EngineConfig:
        held = {"kv_cache_dtype": spec.kv_cache_dtype} if spec.kv_cache_dtype else {}
        return EngineConfig.from_flat(
            policy=spec.name, policy_args=spec.fields, **{**self._settings, **held, **settings}
        )

    def build(self, spec: PolicySpec, **settings: Any) -> LLMEngine:
        """An engine under this policy. Engines that the caller has dropped are freed first."""
        gc.collect()  # frees the pools of dropped engines before the next is allocated
        config = self._config(spec, settings)
        alone = config.parallel.tensor_parallel_size == 1
        # With ranks each engine loads its own: the model sums over the ranks that it was made for.
        engine = LLMEngine(config, self._model if alone else None)
        # The ranks are processes: they would outlive an engine that the caller drops.
        weakref.finalize(engine, engine.core.executor.close)
        self._model = engine.core.runner.model
        return engine


@contextmanager
def opened_checkpoint(args: argparse.Namespace) -> Iterator[MeasuredModel]:
    """The model of ``--model``, or of ``--shape`` in a temporary directory."""
    if args.threads:
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)  # the engine keeps this number
    with tempfile.TemporaryDirectory(prefix="kvserve-bench-") as scratch:
        load_format, shape = args.load_format, getattr(args, "shape", None)
        code = bool(getattr(args, "trust_remote_code", None))
        if shape is None:
            name, path = args.model, find_model(args.model, code=code)
        else:
            name, path, load_format = f"shape {shape}", Path(scratch), "dummy"
            (path / "config.json").write_text(json.dumps(SHAPES[shape]))
            random_statistics(choose_spec(path, ModelConfig()), args.seed).save(path / FILE)
        spec, tokenizer = choose_spec(path, ModelConfig()), args.tokenizer or str(path)
        yield MeasuredModel(name, path, tokenizer, load_format, spec, code)


def random_statistics(spec: ModelSpec, seed: int) -> QueryStatistics:
    """Statistics as random as the weights: what an event costs does not depend on them."""
    generator = torch.Generator().manual_seed(seed)
    shape = spec.num_layers, spec.num_heads, spec.head_dim
    mean = torch.randn(*shape, generator=generator)
    magnitude = mean.unflatten(-1, (2, -1)).norm(dim=-2)
    magnitude += torch.rand(magnitude.shape, generator=generator)
    return QueryStatistics(mean, magnitude, 1, identity_of(spec))
