"""No step waits for its device: an engine on torch's meta device, which holds no numbers.

What would read a number back from a GPU (``item``, ``nonzero``, a mask as an index) has nothing to
read there and raises. Host memory that is copied as torch would wait for it, and operators given
tensors of both devices, are errors of a dispatch mode.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve import LLM, SamplingParams
from kvserve.engine import coder, compressor, rank, sampler, startup
from kvserve.engine.attention.by_phase import ByPhase
from kvserve.engine.attention.select import Choice, Needs
from kvserve.engine.attention.triton import TritonAttention
from kvserve.engine.coder import Codebook, Coder
from kvserve.engine.model_runner import LaunchedStep, ModelRunnerOutput
from kvserve.engine.models import transformer
from kvserve.engine.models.operators import TRITON, Operators
from kvserve.engine.policies import kara, scoring
from kvserve.kernels.codebook import Cover
from kvserve.kernels.compact_kv import compact_kv_triton
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.gather_kv import gather_keys_triton, gather_queries_triton
from kvserve.kernels.sample_tokens import sample_tokens_triton
from kvserve.kernels.store_kv import store_kv_triton, store_queries_triton
from kvserve.kernels.token_to_chunk import token_to_chunk_triton
from kvserve.kernels.window_scores import window_scores_triton
from kvserve.log import ConfigError
from kvserve.scheduler.output import ObservationTask
from tests.checkpoints import random_prompts, write_checkpoint

ATEN = torch.ops.aten
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


class NoWaits(TorchDispatchMode):
    """Raises where a GPU would be waited for, or would refuse."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.overloadpacket in (ATEN.to, ATEN._to_copy, ATEN.copy_):
            names = (argument.name for argument in func._schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            source = given.get("src", given["self"])
            if source.device != result.device:
                assert given.get("non_blocking"), f"a copy to {result.device} is waited for"
            return result
        devices = {x.device for x in args if isinstance(x, Tensor) and x.dim()}
        assert len(devices) <= 1, f"{func} is given tensors of {devices}"
        return result


def collect(step: LaunchedStep) -> ModelRunnerOutput:
    """Some tokens, and counts for policies that choose them: nothing can be read back."""
    tokens = 0 if step.sampled is None else len(step.sampled.token_ids)
    counts = [np.full(kept.shape, 4, np.int32) for kept in step.kept_counts]
    return ModelRunnerOutput(np.full(tokens, 5, np.int32), None, counts, [], 0.0)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on ``meta`` takes the launchers that it takes on CUDA; kernels do not run."""

    def choose(wanted: str, needs: Needs) -> Choice:
        attention = TritonAttention(needs.scale, needs.block_size)
        stores = store_kv_triton, store_queries_triton
        return Choice("triton", ByPhase(attention, attention), *stores, "")

    monkeypatch.setattr(startup, "_device", lambda config: "meta")
    monkeypatch.setattr(rank, "select_backend", choose)
    operators = Operators("triton", "", *TRITON)
    monkeypatch.setattr(transformer, "select_operators", lambda dtype, device: operators)
    monkeypatch.setattr(compressor, "gather_keys", gather_keys_triton)
    monkeypatch.setattr(compressor, "gather_queries", gather_queries_triton)
    monkeypatch.setattr(compressor, "compact_kv", compact_kv_triton)
    monkeypatch.setattr(scoring, "window_scores", window_scores_triton)
    monkeypatch.setattr(sampler, "sample_tokens", sample_tokens_triton)
    monkeypatch.setattr(kara, "token_to_chunk", token_to_chunk_triton)
    monkeypatch.setattr(Kernel, "launch", lambda kernel, grid, *args, **options: None)
    monkeypatch.setattr(LaunchedStep, "collect", collect)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("sizes", [(), (2, 6)], ids=["eager", "padded"])
@pytest.mark.parametrize(
    "policy",
    [
        KARA,
        KARA | RECOMPUTED,
        {"name": "h2o", "budget": 16},
        {"name": "adakv", "budget": 8, "window": 4},
    ],
    ids=["kara", "recompute", "h2o", "adakv"],
)
def test_no_step_waits(policy: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Chunks and decodes (as they are, and as graphs hold them), events of all sources of queries,
    sampling by most rules."""
    llm = LLM(
        str(write_checkpoint("llama", tmp_path, num_attention_heads=4)),
        policy=policy,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        num_gpu_blocks_override=240,
        cudagraph_capture_sizes=sizes,
    )
    with NoWaits():
        prompts = random_prompts([5, 17, 33, 1])
        outputs = llm.generate(prompts, [GREEDY, DRAWN] * 2, use_tqdm=False)
    assert any(output.kv_cache_details.compactions for output in outputs)


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize(
    ("sizes", "gqa"),
    [((), "mean"), ((2, 6), "mean"), ((), "repeat")],
    ids=["eager", "padded", "repeat"],
)
def test_codes_are_written_and_read_without_waits(
    sizes: tuple[int, ...], gqa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compares entries, to find codes for them, does wait: it takes as many rounds as there
    are likenesses. It is left out."""

    def compare(
        new: Tensor, there: Tensor, *entries: Tensor, weights: Tensor | None = None
    ) -> Cover:
        assert weights is None or gqa == "repeat"
        return Cover(torch.zeros_like(there.long()), torch.zeros_like(there.long()), entries[-1])

    def codebook(self: Coder, task: ObservationTask, tables: tuple[Tensor, ...]) -> Codebook:
        counts = self._by_lane(tables[5], task.rows)
        none = counts.new_zeros(*counts.shape, 0)
        vectors = self._store.vectors.new_zeros(*none.shape, self._store.vectors.shape[-1])
        return Codebook(vectors, counts, none.bool(), none)

    monkeypatch.setattr(coder, "extend", compare)
    monkeypatch.setattr(Coder, "_codebook", codebook)
    spindle = {"name": "spindlekv", "gqa": gqa}
    llm = LLM(
        str(write_checkpoint("llama", tmp_path, num_attention_heads=4)),
        policy={**spindle, "window": 4, "flush_every": 4, "raw_fallback": False},
        dtype="bfloat16",
        skip_tokenizer_init=True,
        block_size=4,
        max_num_batched_tokens=32,
        max_num_seqs=6,
        num_gpu_blocks_override=2000,
        cudagraph_capture_sizes=sizes,
    )
    assert ("codes", "read") in [row[:2] for row in llm.engine.core.info.summary]
    with NoWaits():
        outputs = llm.generate(random_prompts([5, 17, 33]), GREEDY, use_tqdm=False)
    for output in outputs:
        details = output.kv_cache_details
        assert details.compactions > 2 and details.coded_entries and details.codebook_entries


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda: torch sees no CUDA device"):
        LLM(str(llama_dir), device="cuda", skip_tokenizer_init=True)
