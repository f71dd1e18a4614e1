"""An engine on torch's meta device, which holds no numbers and runs no kernels.

It takes every decision that it takes on CUDA: tests see which kernels it launches, how, and whether
it waits. Nothing can be read back, so tokens and counts are made up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.attention.combined import ByPhase
from kvserve.engine.attention.paged import PagedAttention
from kvserve.engine.attention.select import Choice, Needs
from kvserve.engine.compression import coder
from kvserve.engine.compression.coder import Codebook, Coder
from kvserve.engine.core.kv_trace import KVTracer, TracedMove
from kvserve.engine.models import transformer
from kvserve.engine.models.operators import TRITON, Operators
from kvserve.engine.policies import kara, scoring
from kvserve.engine.runner import plan
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunnerOutput
from kvserve.engine.sampling import sampler
from kvserve.kernels import storage
from kvserve.kernels.attend import decode_inputs
from kvserve.kernels.attend.paged_attention_triton import paged_attention_triton
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.sample.sample_tokens_triton import sample_tokens_triton
from kvserve.kernels.score.codebook import Cover
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from kvserve.outputs import KVTraceEvent
from kvserve.scheduler.messages.event import Events
from tests.checkpoints import write_checkpoint

KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.4, "period": 5}
RECOMPUTED = {"query_source": "recompute", "query_stride": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
DRAWN = SamplingParams(
    max_tokens=24,
    seed=1,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    min_tokens=3,
    presence_penalty=0.5,
    logit_bias={3: 1.0},
    stop_token_ids=[7],
    logprobs=2,
)

traced: list[list[TracedMove]] = []
"""What was queued for followers: it cannot be read either."""


def note_moves(tracer: KVTracer, moves: list[TracedMove]) -> list[tuple[int, KVTraceEvent]]:
    traced.append(moves)
    return []


def collect(step: LaunchedStep) -> ModelRunnerOutput:
    """Some tokens, and counts for policies that choose them: nothing can be read back."""
    tokens = 0 if step.sampled is None else len(step.sampled.token_ids)
    scores = [np.full(kept.shape, 4, np.int32) for kept in step.events]
    return ModelRunnerOutput(np.full(tokens, 5, np.int32), None, scores, [], 0.0)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on ``meta`` takes the launchers that it takes on CUDA; kernels do not run."""

    def choose(wanted: str, needs: Needs) -> Choice:
        attention = PagedAttention(paged_attention_triton, needs.scale, needs.block_size)
        return Choice("triton", ByPhase(attention, attention), storage.TRITON, "")

    monkeypatch.setattr(plan, "device_of", lambda config: "meta")
    monkeypatch.setattr(plan, "select_backend", choose)
    operators = Operators("triton", "", *TRITON)
    monkeypatch.setattr(transformer, "select_operators", lambda dtype, device: operators)
    monkeypatch.setattr(decode_inputs, "decode_inputs_torch", decode_inputs.decode_inputs_triton)
    monkeypatch.setattr(scoring, "window_scores", window_scores_triton)
    monkeypatch.setattr(sampler, "sample_tokens", sample_tokens_triton)
    monkeypatch.setattr(kara, "token_to_chunk", token_to_chunk_triton)
    monkeypatch.setattr(Kernel, "launch", lambda kernel, grid, *args, **options: None)
    monkeypatch.setattr(LaunchedStep, "collect", collect)
    monkeypatch.setattr(KVTracer, "read", note_moves)
    traced.clear()


def small_engine(folder: Path, policy: dict[str, Any] | str, **settings: Any) -> LLM:
    """A bfloat16 engine of three layers, or of the ``model`` given; six rows, chunks of up to 32
    tokens, four heads."""
    defaults: dict[str, Any] = {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 6,
        "num_gpu_blocks_override": 240,
    }
    sizes = {"num_attention_heads": settings.pop("heads", 4), "head_dim": settings.pop("dim", 16)}
    model = settings.pop("model", None) or write_checkpoint("llama", folder, **sizes)
    return LLM(str(model), policy=policy, **defaults | settings)


@pytest.fixture
def no_likenesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No entry is compared with others to find a code for it: that waits for the device, as it
    takes as many rounds as there are likenesses."""

    def compare(
        new: Tensor, there: Tensor, *entries: Tensor, weights: Tensor | None = None
    ) -> Cover:
        return Cover(torch.zeros_like(there.long()), torch.zeros_like(there.long()), entries[-1])

    def codebook(self: Coder, task: Events, tables: tuple[Tensor, ...]) -> Codebook:
        counts = self._by_lane(tables[5], task.rows)
        none = counts.new_zeros(*counts.shape, 0)
        vectors = self._store.vectors.new_zeros(*none.shape, self._store.vectors.shape[-1])
        return Codebook(vectors, counts, none.bool(), none)

    monkeypatch.setattr(coder, "extend", compare)
    monkeypatch.setattr(Coder, "_codebook", codebook)
