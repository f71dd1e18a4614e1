"""Decoding steps on a CPU that are recorded once and played: the same numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.runner.recorded_steps import RecordedSteps, _Memory
from kvserve.scheduler.arrays import IntArray
from tests.checkpoints import write_checkpoint
from tests.engine.guesses import SPECULATIVE
from tests.engine.models.decoding import row_of
from tests.engine.runner.test_cuda_graph import KARA, PROMPTS, generate, make_llm, make_plain, run
from tests.engine.runner.test_speculation import answers, guessing
from tests.engine.test_pressure import watch
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow, thinned

pytestmark = pytest.mark.compiler


def recorded_steps(llm: LLM) -> RecordedSteps:
    graphs = llm.engine.core.runner.graphs
    assert isinstance(graphs, RecordedSteps)
    return graphs


@pytest.mark.parametrize("dtype", ["auto", *slow("int8", "fp8", "k8v4"), "k4v4"])
def test_logits_are_equal_bit_for_bit(llama_dir: Path, dtype: str) -> None:
    """Over every form of cache, with swaps and recomputation; freed numbers are spoilt."""
    settings: dict[str, Any] = {"kv_cache_dtype": dtype, "block_size": 16}
    tight: dict[str, Any] = {"num_gpu_blocks_override": 46, "swap_space": 1 / 2048}
    seen: list[tuple[list[list[int]], bytes]] = []
    for make in (make_plain, make_llm):
        llm = make(llama_dir, KARA, **settings, **tight)
        if dtype == "auto":
            watch(llm)
        preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.2)
        model = llm.engine.core.runner.model
        found: list[bytes] = []
        logits = model.logits

        def noted(hidden: torch.Tensor, logits: Any = logits, found: Any = found) -> torch.Tensor:
            answer: torch.Tensor = logits(hidden)
            found.append(answer.numpy().tobytes())
            return answer

        model.logits = noted  # type: ignore[method-assign]
        tokens = generate(llm, PROMPTS, [KARA] * len(PROMPTS))
        seen.append((tokens, b"".join(found)))
        assert llm.stats().preemptions_total
    assert recorded_steps(llm).replays > 30
    assert seen[0] == seen[1]


OTHERS = ["gemma2", "gemma3", "granite", "olmo2", "qwen3_5"]


@thinned({"name": OTHERS, "dtype": ["float32", "bfloat16"]})
def test_other_families(name: str, dtype: str, tmp_path: Path) -> None:
    """Norms in float32, GELU, norms behind, scaled residuals and states: the same tokens as
    without."""
    write_checkpoint(name, tmp_path)
    llm = make_llm(tmp_path, "none", dtype=dtype)
    eager = make_llm(tmp_path, "none", dtype=dtype, enforce_eager=True)
    policies = ["none"] * len(PROMPTS)
    assert generate(llm, PROMPTS, policies) == generate(eager, PROMPTS, policies)
    assert recorded_steps(llm).refused is None and recorded_steps(llm).replays > 0


LOGS_FP8 = KARA | {"query_dtype": "fp8", "attention": "window"}


@pytest.mark.parametrize(
    ("name", "policy"), [("qwen3-moe", "none"), ("gpt-oss", "none"), ("llama", LOGS_FP8)], ids=str
)
def test_what_torch_computes_is_not_recorded(name: str, policy: Any, tmp_path: Path) -> None:
    """The start-up table says which operator it was, and decoding goes on without."""
    write_checkpoint(name, tmp_path)
    llm = make_llm(tmp_path, policy)
    graphs = recorded_steps(llm)
    assert graphs.refused is not None and graphs.refused.startswith("aten.")
    _, state, why = row_of(llm, "recorded steps")
    assert state == "off" and graphs.refused in why
    generate(llm, PROMPTS, [policy] * len(PROMPTS))
    assert graphs.replays == 0


def test_weights_that_onednn_reorders_are_not_recorded(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such weights have no address that may be asked for."""
    monkeypatch.setattr("kvserve.engine.models.loader.select_product", lambda *_: ("oneDNN", ""))
    llm = make_llm(llama_dir, "none", speculative_config=SPECULATIVE)
    assert recorded_steps(llm).refused == "mkldnn._linear_pointwise.default"
    generate(llm, PROMPTS, ["none"] * len(PROMPTS))
    assert recorded_steps(llm).replays == 0


def test_a_block_that_is_not_there_is_refused_in_a_played_step(llama_dir: Path) -> None:
    """The kernel's own words, and nothing behind that call runs."""
    llm = make_llm(llama_dir, "none")
    runner = llm.engine.core.runner
    graphs, batch = recorded_steps(llm), runner.batch
    batch.num_computed[0] = batch.kv_lens[:, 0] = 3
    batch.block_tables[:, 0] = 1
    with torch.inference_mode():
        graphs.decode(1, False)
        batch.block_tables[:, 0] = len(runner.cache.kv)
        with pytest.raises(IndexError, match="store_kv: slot"):
            graphs.decode(1, False)


def test_living_tensors_never_share_memory() -> None:
    """A random program of tensors that live and die: each keeps what was written to it."""
    memory, rng = _Memory(), np.random.default_rng(0)
    alive: list[tuple[torch.Tensor, int]] = []
    for number in range(2000):
        while len(alive) > rng.integers(20):
            alive.pop(int(rng.integers(len(alive))))
        size = torch.Size([int(rng.integers(0, 50)), int(rng.integers(1, 300))])
        tensor = memory.tensor(size, torch.int32)
        assert tensor.shape == size and tensor.data_ptr() % 64 == 0
        alive.append((tensor.fill_(number).view(-1)[: tensor.numel()], number))
        assert all((each == owner).all() for each, owner in alive)
    del tensor
    alive.clear()
    gc.collect()
    assert len(memory._free) == len(memory._chunks) < 4, "what died is merged again"


def test_few_tapes_hold_chunks_of_any_lengths(llama_dir: Path) -> None:
    """Whose chunks they are, and how long each is, is told when it is played."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=150 + i, ignore_eos=True) for i in range(4)
    ]
    plain = answers(run(make_plain(llama_dir, KARA), params))
    llm, _ = guessing(llama_dir, KARA, plain)
    steps, seen = recorded_steps(llm), set()
    forward = steps.chunks

    def noted(
        lengths: IntArray, token_ids: IntArray, logs_queries: bool = False
    ) -> torch.Tensor | None:
        seen.add((*lengths.tolist(), logs_queries))
        return forward(lengths, token_ids, logs_queries)

    steps.chunks = noted  # type: ignore[method-assign]
    assert answers(run(llm, params)) == plain
    shapes = {(*steps._padded(len(each) - 1, sum(each[:-1])), each[-1]) for each in seen}
    assert shapes <= steps._tapes.keys() and len(shapes) < len(seen) / 2


@pytest.mark.parametrize("lengths", [[6, 1, 1, 1], [9], [1, 2, 7, 1, 3], [8] * 4, [5] * 8], ids=str)
def test_padding_changes_no_bit(llama_dir: Path, lengths: list[int]) -> None:
    """Neither when a shape is recorded nor when it is played, behind longer chunks."""
    llm = make_llm(llama_dir, "none", max_num_seqs=8, block_size=16)
    runner, n = llm.engine.core.runner, len(lengths)
    graphs, batch, chunks = recorded_steps(llm), runner.batch, np.array(lengths)
    runner.cache.kv.normal_()
    ids = np.arange(int(chunks.sum())) % 50
    starts = np.concatenate([[0], np.cumsum(chunks)])

    def of_rows(compute: Callable[[], torch.Tensor | None]) -> torch.Tensor:
        batch.num_computed[:] = batch.kv_lens[:] = 3
        batch.block_tables[:, :, :, :2] = torch.arange(1, 17).view(1, 8, 1, 2)
        computed = compute()
        assert computed is not None
        hidden = computed.clone()
        assert batch.num_computed.tolist() == [3 + length for length in lengths] + [3] * (8 - n)
        return hidden

    def exact() -> torch.Tensor:
        step = graphs._parts.chunks(starts, False, torch.tensor(n))
        assert step.token_ids is not None
        step.token_ids.copy_(torch.as_tensor(ids))
        return step.forward()

    with torch.inference_mode():
        expected = of_rows(exact)
        for _ in range(2):
            assert torch.equal(of_rows(lambda: graphs.chunks(chunks, ids)), expected)
            if sum(lengths) < 120:  # the same tape, with as many tokens as it has room for
                most = chunks.copy()
                most[-1] += -len(ids) % 8
                graphs.chunks(most, np.arange(int(most.sum())) % 50)
    assert graphs.chunk_replays > 1
