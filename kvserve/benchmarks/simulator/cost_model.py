"""Modelled times of steps and events on a device, from the shapes of a model.

A step takes the longer of reading the weights and the arithmetic of its tokens, then reads the
cache. An event obtains queries, scores with them and moves entries. No tensors here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvserve.kernels.entry_format import entry_format
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import CompactionTask

if TYPE_CHECKING:  # not imported at run time, because the module loads torch
    from kvserve.engine.models.spec import ModelSpec

_GIB = 2**30
_LLAMA: dict[str, Any] = {
    **{"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 131072},
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336},
    **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
}
_QWEN3: dict[str, Any] = {
    **{"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 40960},
    **{"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    "tie_word_embeddings": True,
}
_QWEN3_MOE: dict[str, Any] = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "max_position_embeddings": 40960},
    **{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "head_dim": 128},
    **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "norm_topk_prob": True,
}
_GPT_OSS: dict[str, Any] = {
    **{"architectures": ["GptOssForCausalLM"], "max_position_embeddings": 131072},
    **{"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "head_dim": 64},
    **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "attention_bias": True},
    **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12},
}
LARGE_SHAPES = {
    **{"llama-3.1-8b": _LLAMA, "qwen3-4b": _QWEN3},
    **{"qwen3-30b-a3b": _QWEN3_MOE, "gpt-oss-20b": _GPT_OSS},
}
"""The parts of config.json files that costs depend on."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """Rates that a device sustains (bytes and operations per second, not its data sheet's), seconds
    of overhead per step and per step with events, and bytes of memory.

    ``attention_bandwidth``: of attention's reads of the cache. ``host_bandwidth``: of transfers to
    host memory. ``fp8``: whether logged queries and the cache may be stored in fp8.
    """

    bandwidth: float
    attention_bandwidth: float
    gemm: float
    scoring: float
    memory: int
    step_overhead: float = 2e-3
    event_overhead: float = 1.5e-3
    host_bandwidth: float = 50e9
    dtype_bytes: int = 2
    fp8: bool = True


DEVICES = {
    "h200": Device(
        bandwidth=4.0e12, attention_bandwidth=4.0e12, gemm=600e12, scoring=300e12, memory=140 * _GIB
    ),
    "h100": Device(
        bandwidth=2.8e12, attention_bandwidth=2.8e12, gemm=600e12, scoring=300e12, memory=80 * _GIB
    ),
    "a100": Device(
        bandwidth=1.7e12,
        attention_bandwidth=1.7e12,
        gemm=230e12,
        scoring=115e12,
        memory=80 * _GIB,
        fp8=False,
    ),
    # 24 GB cards: the shares of their data sheets that the ones above sustain.
    "rtx4090": Device(
        bandwidth=0.85e12,
        attention_bandwidth=0.85e12,
        gemm=110e12,
        scoring=55e12,
        memory=24 * _GIB,
        host_bandwidth=20e9,
    ),
    "a10": Device(
        bandwidth=0.5e12,
        attention_bandwidth=0.5e12,
        gemm=80e12,
        scoring=40e12,
        memory=24 * _GIB,
        host_bandwidth=20e9,
        fp8=False,
    ),
    "l4": Device(
        bandwidth=0.25e12,
        attention_bandwidth=0.25e12,
        gemm=70e12,
        scoring=35e12,
        memory=24 * _GIB,
        host_bandwidth=20e9,
    ),
    # One core, float32, fitted to runs of 2026-11-20; attention there gathers blocks first.
    "cpu": Device(
        bandwidth=14e9,
        attention_bandwidth=4e9,
        gemm=60e9,
        scoring=20e9,
        memory=_GIB,
        step_overhead=1.5e-3,
        event_overhead=1e-3,
        dtype_bytes=4,
        fp8=False,
    ),
}


@dataclass(frozen=True)
class Queries:
    """Where an event's queries come from, and how many of them score.

    ``source``: none (scores need no queries), log, recompute, or host (a log in host memory).
    ``heads``: query vectors per token. ``share``: the share of a window's tokens whose queries
    score.
    """

    source: str
    heads: int = 0
    share: float = 1.0


class CostModel:
    """Times in seconds, for one model on one device.

    ``params`` are those that a token uses: of a mixture, the experts that it is sent to.
    ``weights_s``: reading all weights once, as a batch of many tokens does. ``token_s``: the
    arithmetic of one decoded token.
    ``entry_s``: reading one token's keys and values, stored as ``kv_cache_dtype``, in the layers
    that see all tokens. A sequence's windows are as many bytes as ``window_entries`` of those.
    The arithmetic with entries takes the same time in every dtype.
    """

    def __init__(self, spec: ModelSpec, device: Device, kv_cache_dtype: str = "auto") -> None:
        self.spec = spec
        self.device = device
        self.form = entry_format(kv_cache_dtype, device.dtype_bytes)
        query_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        to_queries = spec.hidden_size * query_width
        used, held = _feed_forward_params(spec)
        without_kv = 2 * to_queries + used
        self.layer_params = spec.num_layers * (without_kv + 2 * spec.hidden_size * kv_width)
        self.head_params = spec.vocab_size * spec.hidden_size
        # Recomputed queries need no key and value projections, and in the last layer only the query
        # projection.
        self.recompute_params = (spec.num_layers - 1) * without_kv + to_queries
        self.params = self.layer_params + self.head_params
        self._full = len(spec.layers.full) or spec.num_layers
        self._windowed_per_full = len(spec.windowed) / self._full
        self.entry_bytes = self._full * spec.num_kv_heads * self.form.entry_bytes(spec.head_dim)
        self.window_entries = float(self.in_windows(np.array(spec.max_position)))
        self.weights_bytes = (self.params + spec.num_layers * (held - used)) * device.dtype_bytes
        self.weights_s = self.weights_bytes / device.bandwidth
        self.token_s = 2 * self.params / device.gemm
        self.entry_s = self.entry_bytes / device.attention_bandwidth

    def in_windows(self, tokens: IntArray) -> IntArray:
        """What layers with windows hold of ``tokens``, in entries of the layers without."""
        return self._windowed_per_full * np.minimum(tokens, self.spec.window or 0)

    def step(self, tokens: int, sampled: int, held: float, prefill_pairs: float) -> float:
        """One forward of ``tokens`` tokens, ``sampled`` of which go through the head.

        ``held`` entries are read once; chunks score ``prefill_pairs`` pairs of query and key. Both
        are of the layers that see all tokens, with ``in_windows`` for the others.
        """
        operations = 2 * (self.layer_params * tokens + self.head_params * sampled)
        return (
            max(self.weights_s, operations / self.device.gemm)
            + held * self.entry_s
            + self._attention(prefill_pairs)
            + self.device.step_overhead
        )

    def events(self, tasks: Iterable[CompactionTask], queries: Queries) -> float:
        """All events of one step together; 0 if there are none."""
        tasks = tuple(tasks)
        if not tasks:
            return 0.0
        seconds = self.device.event_overhead
        for task in tasks:
            plan = task.plan
            asked = plan.windows * plan.num_queries * queries.share
            # Recomputed queries attend to what precedes them: on average half of their own windows.
            spanned = (plan.windows - 1) * plan.window_len + plan.num_queries
            seen = plan.region_start + spanned / 2
            seconds += self.observe(
                float(asked.sum()),
                float((asked * plan.window_len).sum()),
                float((asked * seen).sum()),
                queries,
            )
            written = task.new_lens - task.copy_start[:, None]  # [LG, E, R]
            seconds += self.move(float(written.mean(axis=(0, 2)).sum()))
        return seconds

    def swap(self, entries: float) -> float:
        """Take ``entries`` of all layers to host memory, or back."""
        return entries * self.entry_bytes / self.device.host_bandwidth

    def observe(self, asked: float, scored: float, seen: float, queries: Queries) -> float:
        """Obtain queries of ``asked`` tokens, and score ``scored`` pairs with keys in two passes.

        Recomputing the queries also attends over ``seen`` pairs.
        """
        spec, device = self.spec, self.device
        width = self._full * queries.heads * spec.head_dim
        scoring = 2 * 2 * width * scored / device.scoring
        if queries.source == "host":
            return max(scoring, asked * width * device.dtype_bytes / device.host_bandwidth)
        if queries.source == "recompute":
            operations = 2 * self.recompute_params * asked
            weights_s = self.recompute_params * device.dtype_bytes / device.bandwidth
            scoring += max(weights_s, operations / device.gemm) + self._attention(seen)
        return scoring

    def move(self, entries: float) -> float:
        """Read and write ``entries`` in all layers."""
        return 2 * entries * self.entry_bytes / self.device.bandwidth

    def _attention(self, pairs: float) -> float:
        spec = self.spec
        return 4 * self._full * spec.num_heads * spec.head_dim * pairs / self.device.gemm


def _feed_forward_params(spec: ModelSpec) -> tuple[int, int]:
    """Weights of a layer's MLP that a token uses, and all that it holds; of most layers."""
    experts = spec.experts
    if experts is None:
        used = 3 * spec.hidden_size * spec.intermediate_size
        return used, used
    router, each = (
        experts.count * spec.hidden_size,
        3 * spec.hidden_size * experts.intermediate_size,
    )
    return router + experts.per_token * each, router + experts.count * each
