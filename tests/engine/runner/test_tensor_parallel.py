"""Two ranks give what one gives: tokens, kept entries, errors. On a CPU, over gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from threading import Thread
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.config import ModelConfig
from kvserve.engine.compression.moves import MovePlan
from kvserve.engine.device.shared_group import SharedGroup
from kvserve.engine.models.checkpoint import SafetensorsFiles
from kvserve.engine.models.loader import load_model
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.runner.ranks import Ranks
from kvserve.kernels.layer.weight_levels import Levels
from kvserve.log import ConfigError, EngineDeadError
from kvserve.outputs import RequestOutput
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts, read_spec, write_checkpoint
from tests.engine.models.decoding import make
from tests.engine.test_pressure import before_steps
from tests.quantized_checkpoints import AWQ, fp8_config, quantize

KARA = {"name": "kara", "window": 16, "buffer": 4, "period": 1}
TRIATTENTION = {"name": "triattention", "budget": 30, "period": 4, "recent": 2}
REQUESTS: list[dict[str, Any]] = [
    {"kv_policy": "none"},
    {"kv_policy": KARA},
    {"kv_policy": {**KARA, "query_source": "recompute"}},
    {"kv_policy": {"name": "kara", "window": 16, "buffer": 8, "score_every": 8}},
    {"kv_policy": {"name": "snapkv", "budget": 24, "window": 6, "attention": "absolute"}},
    {"kv_policy": {"name": "pyramidkv", "budget": 20, "trigger": "threshold", "threshold": 30}},
    {"kv_policy": {"name": "dynamickv", "budget": 20, "interval": 2}},
    {"kv_policy": {"name": "windowkv", "budget": 40, "window": 4, "chunk_size": 4}},
    {"kv_policy": {"name": "chunkkv", "budget": 24, "chunk_size": 6}},
    {"kv_policy": {"name": "pyramidinfer", "min_context": 6, "decay": 0.2, "period": 8}},
    {"kv_policy": {"name": "h2o", "budget": 30}},
    {"kv_policy": TRIATTENTION},
    {"kv_policy": {**TRIATTENTION, "mode": "union"}},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "presence_penalty": 1.0},
    {"kv_policy": "none", "prompt_logprobs": 2, "logprobs": 2},
]
PROMPTS = random_prompts([50, 5, 7, 33, 80, 33, 90, 64, 71, 85, 40, 55, 48, 37, 45])


@contextmanager
def started(directory: Path, ranks: int, **settings: Any) -> Iterator[LLM]:
    policy = {"name": "snapkv", "budget": 24, "window": 6, "query_dtype": "int4"}
    how = {"policy": policy, "tensor_parallel_size": ranks, "kv_layout": "layer"}
    llm = make(directory, **how, **settings)
    try:
        yield llm
    finally:
        llm.close()


def generate(llm: LLM) -> list[RequestOutput]:
    """All requests at once; they do not fit the pool."""
    settings = {"temperature": 0.0, "max_tokens": 50, "ignore_eos": True}
    params = [SamplingParams(**{**settings, **request}) for request in REQUESTS]
    return llm.generate(PROMPTS, params, use_tqdm=False)


class Kept:
    """Which entries every event keeps in the first layer group's first KV head of each layer."""

    def __init__(self, llm: LLM) -> None:
        self.plans: list[Tensor] = []
        llm.engine.core.runner.compressor.on_moves = self._on_moves

    def _on_moves(self, task: Events, plan: MovePlan) -> None:
        sources = torch.cat([plan.src, plan.counts[..., None]], dim=-1)
        self.plans.append(sources[:, :, :1])


@pytest.mark.compiler
def test_two_ranks_generate_and_keep_what_one_does(tmp_path: Path) -> None:
    # Weights this large leave no near ties that another order of summation could turn; 129 tokens
    # are shared out as 65 and 64.
    directory = write_checkpoint("llama", tmp_path, vocab_size=129)
    results = []
    settings: dict[str, Any] = {"num_gpu_blocks_override": 70, "async_scheduling": True}
    # As on GPUs: steps overlap, and two ranks decode by padded ones.
    for ranks, sizes in ((1, ()), (2, (3, 9))):
        with started(directory, ranks, cudagraph_capture_sizes=sizes, **settings) as llm:
            kept = Kept(llm)
            results.append((generate(llm), kept.plans))
            stats = llm.stats()
            assert stats.preemptions_total > 0 and stats.swaps_total > 0
    (expected, kept_of_one), (found, kept_of_two) = results
    for request, one, two in zip(REQUESTS, expected, found, strict=True):
        assert two.outputs[0].token_ids == one.outputs[0].token_ids, request
        assert two.kv_cache_details == one.kv_cache_details, request
        events = one.kv_cache_details.compactions if one.kv_cache_details else 0
        assert (events > 0) == (request.get("kv_policy") != "none"), request
        assert _numbers(two) == pytest.approx(_numbers(one), abs=1e-4)
    assert len(_numbers(expected[-1])) > 100
    assert len(kept_of_one) == len(kept_of_two) > 50
    assert all(torch.equal(a, b) for a, b in zip(kept_of_one, kept_of_two, strict=True))


def _numbers(output: RequestOutput) -> list[float]:
    """Log-probabilities of the prompt and of what was generated."""
    entries = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [entry[token].logprob for entry in entries if entry for token in sorted(entry)]


def test_ranks_that_hold_different_entries_end_the_engine(llama_dir: Path) -> None:
    with started(llama_dir, 2) as llm:
        assert "tensor parallel" in str(llm.engine.core.described().summary)
        last_token = llm.engine.core.runner.batch.last_token
        before_steps(llm, lambda _: last_token.fill_(3))
        with pytest.raises(EngineDeadError, match="no longer hold the same entries"):
            generate(llm)
        with pytest.raises(EngineDeadError):
            generate(llm)


def process_of_rank_1(llm: LLM) -> Popen[bytes]:
    ranks = llm.engine.core.executor
    assert isinstance(ranks, Ranks)
    (process,) = ranks._processes
    return process


def test_a_dead_rank_ends_the_engine(llama_dir: Path) -> None:
    with started(llama_dir, 2) as llm:
        process = process_of_rank_1(llm)
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        llm.engine.add_request("a", PROMPTS[0], params)
        llm.engine.step()
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"rank 1 ended \(exit code -9\)"):
            while True:
                llm.engine.step()
        with pytest.raises(EngineDeadError, match="rank 1 ended"):
            generate(llm)


def test_an_interrupted_step_ends_the_engine(llama_dir: Path) -> None:
    """The other rank is in the middle of a step that this one will never finish."""
    with started(llama_dir, 2) as llm:
        process = process_of_rank_1(llm)

        def interrupt(output: SchedulerOutput) -> None:
            raise KeyboardInterrupt

        before_steps(llm, interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate(llm)
        assert process.poll() is not None
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            generate(llm)


def test_a_rank_that_cannot_load_its_part_says_why(llama_dir: Path, tmp_path: Path) -> None:
    tensors = load_file(llama_dir / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][-1, -1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((llama_dir / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"up_proj.weight in .* holds NaN"), started(tmp_path, 2):
        pass


@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [(torch.bfloat16, (256.0, 1.0, 1.0)), (torch.float32, (1e10, -1e10, 258.0))],
)
def test_sums_are_one_wherever_a_row_stands(
    dtype: torch.dtype, numbers: tuple[float, ...], tmp_path: Path
) -> None:
    """Of three ranks, which are threads here; gloo's own are 256 in one place, 258 in another."""
    found = dict[int, Tensor]()

    def add(rank: int) -> None:
        group = SharedGroup.join(rank, 3, tmp_path / "store", "cpu")
        found[rank] = group.sum(torch.full((7, 9), numbers[rank], dtype=dtype))

    ranks = [Thread(target=add, args=(rank,)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 3 and all((x == 258).all() for x in found.values())


# ---- loading ------------------------------------------------------------------------------------


def load(directory: Path, rank: int, size: int) -> Transformer:
    spec, group = read_spec(directory), SharedGroup(rank, size)
    return load_model(directory, ModelConfig(), spec, torch.float32, "cpu", group)


def numbers(weight: Tensor | Levels) -> Tensor:
    return weight.numbers(slice(None)) if isinstance(weight, Levels) else weight


@pytest.mark.parametrize("kind", ["llama", "llama-mha-tied", "internlm2", "qwen2", "fp8", "awq"])
def test_each_rank_reads_its_part_and_no_more(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind in ("fp8", "awq"):
        quantize("llama", tmp_path, AWQ if kind == "awq" else fp8_config("channel"))
    else:
        write_checkpoint(kind, tmp_path)
    read = [0]
    pieces = SafetensorsFiles.pieces

    def counted(self: SafetensorsFiles, *args: Any) -> Iterator[tuple[slice, Tensor]]:
        for place, values in pieces(self, *args):
            read[0] += values.numel() if values.dim() > 1 else 0
            yield place, values

    monkeypatch.setattr(SafetensorsFiles, "pieces", counted)
    # Packed weights can only be multiplied with.
    monkeypatch.setattr("kvserve.engine.models.loader.select_product", lambda *args: ("torch", ""))
    whole = load(tmp_path, 0, 1)
    total, read[0] = read[0], 0
    parts = [load(tmp_path, rank, 2) for rank in range(2)]
    assert read[0] == total > 0
    spec = whole.spec
    for index, layer in enumerate(whole.decoder_layers):
        halves = [part.decoder_layers[index] for part in parts]
        rows = torch.tensor([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]) * spec.head_dim
        for name in ("qkv", "qkv_bias"):
            if (matrix := getattr(layer, name)) is not None:
                shares = [
                    numbers(getattr(half, name)).split((rows // 2).tolist()) for half in halves
                ]
                joined = [torch.cat(pair) for pair in zip(*shares, strict=True)]
                assert torch.equal(torch.cat(joined), numbers(matrix))
        own: Any = layer.mlp
        mlps: list[Any] = [half.mlp for half in halves]
        gates, ups = zip(*(numbers(mlp.gate_up).chunk(2) for mlp in mlps), strict=True)
        assert torch.equal(torch.cat([*gates, *ups]), numbers(own.gate_up))
        for one, several in (
            (layer.out, [half.out for half in halves]),
            (own.down, [mlp.down for mlp in mlps]),
        ):
            assert torch.equal(torch.cat([numbers(x) for x in several], dim=1), numbers(one))
        assert all(torch.equal(half.post_norm, layer.post_norm) for half in halves)
    for name in ("embedding", "head"):
        assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(whole, name))
