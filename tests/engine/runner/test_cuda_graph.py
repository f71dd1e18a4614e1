"""Decoding by captured steps: without a GPU the same padded forwards, over the same buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.core import request_policies
from kvserve.engine.models.spec import read_spec
from kvserve.engine.policies.registry import policy_class, policy_names
from kvserve.engine.runner.launched_step import LaunchedStep
from kvserve.kernels.checks import HEAD_DIMS
from kvserve.log import ConfigError
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts
from tests.engine.policies.cases import CASES, UNEVEN_CASES
from tests.engine.test_pressure import watch
from tests.pretend_cuda import pretend_cuda
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow, thinned

pytestmark = [pytest.mark.device, pytest.mark.compiler]  # steps of compiled kernels are recorded
SIZES = (3, 17, 40)
TOKENS = 40
KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.3, "chunk_budget": 2, "period": 1}
PROMPTS = random_prompts([30, 9, 44, 21, 17, 38, 26, 12], seed=5)
EVEN = [case.spec for case in CASES if case.policy != "long_entries"]


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    settings = {"block_size": 4, "max_num_seqs": 40, "dtype": "float32", **settings}
    return LLM(str(directory), policy=policy, skip_tokenizer_init=True, **settings)


def make_plain(directory: Path, policy: Any, **settings: Any) -> LLM:
    """What others are compared with: no graphs and no overlap, on a GPU neither."""
    return make_llm(directory, policy, enforce_eager=True, async_scheduling=False, **settings)


def generate(llm: LLM, prompts: list[list[int]], policies: list[Any]) -> list[list[int]]:
    """Greedy tokens of unequal numbers; every policy compacts somebody's cache, but ``none``."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS + i, ignore_eos=True, kv_policy=policy)
        for i, policy in enumerate(policies)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    details = [output.kv_cache_details for output in outputs]
    compacted = {each.policy for each in details if each.compactions}
    assert compacted == {each.policy for each in details} - {"none"}
    return [output.outputs[0].token_ids for output in outputs]


def count_steps(llm: LLM) -> dict[str, int]:
    """Steps that have replayed, those of them that came right behind events, that log queries, and
    where somebody sits out beside those who decode."""
    runner, counts = llm.engine.core.runner, dict.fromkeys(("all", "events", "logs", "beside"), 0)
    launch, rows = runner.launch, llm.engine.core.scheduler.rows
    assert runner.graphs is not None
    graphs = runner.graphs

    def counted(output: SchedulerOutput) -> LaunchedStep:
        before = graphs.replays
        step = launch(output)
        if graphs.replays > before:
            counts["all"] += 1
            counts["events"] += bool(output.events.compactions)
            counts["logs"] += output.logs_queries
            counts["beside"] += rows.num_rows > output.num_decoding
        return step

    runner.launch = counted  # type: ignore[method-assign]
    return counts


@thinned({"layout": ["head", "model", "layer"], "sizes": [SIZES, ()]})
def test_every_policy_generates_what_it_does_without(
    llama_dir: Path, layout: str, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All policies of the layout at once, with events between replays and rows that sit out."""
    uneven = [
        spec
        for spec in UNEVEN_CASES.values()
        if policy_class(spec["name"]).granularity.fits(Granularity(layout))
    ] * (layout != "model")
    policies = EVEN + uneven
    monkeypatch.setattr(request_policies, "REMEMBERED", len(policies) + 1)
    prompts = random_prompts([37] * len(policies), seed=3)
    # All heads' queries are logged, so that requests may choose any of the cases.
    default = {"name": "snapkv", "budget": 64}
    settings: dict[str, Any] = {"kv_layout": layout, "max_num_batched_tokens": 512}
    eager = make_plain(llama_dir, default, **settings)
    graphs = make_llm(llama_dir, default, **settings, cudagraph_capture_sizes=sizes)
    counts = count_steps(graphs)
    for part in (slice(0, None, 2), slice(1, None, 2)):  # only so many policies at once
        args = prompts[part], policies[part]
        assert generate(graphs, *args) == generate(eager, *args)
    assert counts["all"] > 60 and counts["events"] > 40 and counts["logs"] > 40
    assert bool(counts["beside"]) == bool(uneven)
    stats, expected = graphs.stats(), eager.stats()
    assert stats.compactions_total == expected.compactions_total > len(policies)
    assert stats.blocks_released_total == expected.blocks_released_total > 0


@pytest.mark.slow
def test_a_baseline_stays_one_on_a_gpu(llama_dir: Path) -> None:
    """And its model is one that the kernels run."""
    assert read_spec(llama_dir).head_dim in HEAD_DIMS
    with pretend_cuda() as queue:
        llm = make_plain(llama_dir, KARA, num_gpu_blocks_override=200)
        generate(llm, PROMPTS[:2], [KARA] * 2)
        summary = {row[0]: row[1] for row in llm.engine.core.info.summary}
    assert queue.graphs == 0 and summary["cuda graphs"] == summary["overlapped steps"] == "off"


def test_no_policy_is_left_out() -> None:
    assert {spec["name"] for spec in [*EVEN, *UNEVEN_CASES.values()]} == set(policy_names())


@pytest.mark.parametrize(
    "policy", [*slow(KARA), {"name": "h2o", "budget": 24}], ids=["kara", "h2o"]
)
def test_memory_that_is_handed_around_is_not_touched(llama_dir: Path, policy: Any) -> None:
    """Swaps, recomputation and freed blocks that are spoilt, all between replays; and nothing that
    a graph reads or writes has moved."""
    eager = make_plain(llama_dir, policy)
    tight = make_llm(
        llama_dir,
        policy,
        num_gpu_blocks_override=56,
        max_num_batched_tokens=64,
        swap_space=1 / 2048,
        cudagraph_capture_sizes=SIZES,
    )
    watch(tight)
    preempt_now_and_then(tight.engine.core.scheduler, np.random.default_rng(0), 0.2)
    runner = tight.engine.core.runner
    tensors = [x for x in vars(runner.batch).values() if isinstance(x, torch.Tensor)]
    tensors.append(runner.cache.kv)
    before = [tensor.data_ptr() for tensor in tensors]
    policies = [policy] * len(PROMPTS)
    assert generate(tight, PROMPTS, policies) == generate(eager, PROMPTS, policies)
    assert tight.stats().preemptions_total and tight.stats().swaps_total
    assert runner.graphs is not None and runner.graphs.replays > 30
    now = [x for x in vars(runner.batch).values() if isinstance(x, torch.Tensor)]
    assert before == [x.data_ptr() for x in [*now, runner.cache.kv]]


@pytest.mark.compiler
def test_codes_are_read_in_replays(llama_dir: Path) -> None:
    """Rows become codes between replays, some are computed again, and freed blocks are spoilt."""
    policy = {"name": "spindlekv", "window": 4, "flush_every": 8, "raw_fallback": False}
    policy |= {"ratio": 0.6, "theta_k": 0.6, "theta_v": 0.5}
    args = PROMPTS, [policy] * len(PROMPTS)
    graphs = make_llm(llama_dir, policy, num_gpu_blocks_override=800, cudagraph_capture_sizes=SIZES)
    watch(graphs)
    preempt_now_and_then(graphs.engine.core.scheduler, np.random.default_rng(0), 0.05)
    counts = count_steps(graphs)
    assert generate(graphs, *args) == generate(make_plain(llama_dir, policy), *args)
    assert counts["all"] > 30 and counts["events"] > 5
    assert graphs.stats().preemptions_total


def test_a_plan_is_made_once(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step would compute from lengths cannot change in a graph: none of it may be asked."""
    llm = make_llm(llama_dir, KARA, cudagraph_capture_sizes=SIZES)
    backend, steps = llm.engine.core.runner.attention, 0
    launch = llm.engine.core.runner.launch

    def launched(output: SchedulerOutput) -> LaunchedStep:
        nonlocal steps
        if len(output.prefill.rows):
            return launch(output)
        steps += 1
        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "plan", None)
            return launch(output)

    monkeypatch.setattr(llm.engine.core.runner, "launch", launched)
    generate(llm, PROMPTS, [KARA] * len(PROMPTS))
    assert steps > TOKENS


def test_more_sequences_than_the_largest_size_decode_without(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, KARA, cudagraph_capture_sizes=(2, 6))
    counts = count_steps(llm)
    tokens = generate(llm, PROMPTS, [KARA] * len(PROMPTS))
    assert 0 < counts["all"] < 12  # as the first ones end
    assert tokens == generate(make_plain(llama_dir, KARA), PROMPTS, [KARA] * len(PROMPTS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "torch"}, "decode attention torch plans each step anew"),
        ({"enforce_eager": True}, "--enforce-eager captures no graphs"),
        ({"max_num_seqs": 2}, "all are above --max-num-seqs 2"),
    ],
    ids=["backend", "eager", "sizes"],
)
def test_sizes_that_cannot_be_captured_are_refused(
    llama_dir: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(llama_dir, **{"policy": "none", "cudagraph_capture_sizes": SIZES} | settings)
