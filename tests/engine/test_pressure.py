"""Too little memory: what must hold while sequences make way for each other."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunner
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import dense_pass, load_dense
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.engine.policies.cases import UNEVEN_BLOCK, UNEVEN_CASES
from tests.engine.recorder import Recorder
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import thinned

PROMPTS = random_prompts([30, 9, 44, 21, 17, 38, 26, 12], seed=5)
TOKENS = 90
KARA = {"name": "kara", "window": 20, "buffer": 4, "ratio": 0.3, "chunk_budget": 2, "max_chunk": 4}
POISON = 1e15  # not NaN: SDPA multiplies what it masks by 0


generate = partial(tokens_of, prompts=PROMPTS, count=TOKENS)


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 8, **settings}
    return make(directory, policy=policy, **settings)


def before_steps(llm: LLM, look: Callable[[SchedulerOutput], object]) -> None:
    """Call ``look`` with each step that is about to be launched."""
    runner = llm.engine.core.runner
    launch = runner.launch

    def launched(output: SchedulerOutput) -> LaunchedStep:
        look(output)
        return launch(output)

    runner.launch = launched  # type: ignore[method-assign]


def right_guesses(output: SchedulerOutput, step: LaunchedStep, rows: int) -> IntArray:
    """How many guesses of each of the first rows are confirmed: the device counts these at once,
    the host when it has the tokens."""
    right = np.zeros(rows, np.int32)
    if output.drafts is not None and step.sampled is not None:
        sampled = step.sampled.token_ids.cpu().numpy()[: len(output.drafts.token_ids)]
        right[: output.num_decoding] = output.drafts.confirmed(sampled) - 1
    return right


def watch(llm: LLM) -> None:
    """After every step: tables name no free block, host and device agree, free ones are spoilt."""
    core = llm.engine.core
    scheduler, runner = core.scheduler, core.runner
    launch, pool = runner.launch, scheduler.pool

    def checked(output: SchedulerOutput) -> LaunchedStep:
        step = launch(output)
        n = scheduler.rows.num_rows
        right = right_guesses(output, step, n)
        held, device = scheduler.blocks.kv_lens[:, :n], runner.batch.kv_lens[:, :n].cpu().numpy()
        assert np.array_equal(held + right[:, None], device)
        computed = scheduler.rows.num_computed[:n]
        assert np.array_equal(computed + right, runner.batch.num_computed[:n].cpu().numpy())
        assert (computed >= held.max(axis=(0, 2), initial=0)).all()
        tables = [table for group in scheduler.blocks.groups for table in group.tables]
        for table, mirror in zip(tables, runner.batch._tables, strict=True):
            column = np.arange(table.blocks.shape[3])
            live = (column >= table.first[..., None]) & (column < table.end[..., None])
            live[:, n:] = False
            named = table.blocks[live]
            assert pool.ref[named].all() and np.array_equal(named, mirror.cpu().numpy()[live])
        runner.cache.kv[torch.as_tensor(np.flatnonzero(pool.ref == 0)[1:])] = POISON
        host = scheduler.saved.host_pool
        runner.cache.host[torch.as_tensor(np.flatnonzero(host.ref == 0)[1:])] = POISON
        return step

    runner.launch = checked  # type: ignore[method-assign]


H2O = {"name": "h2o", "budget": 24}
RECOMPUTING = {**KARA, "period": 1, "query_source": "recompute"}
PER_HEAD = {"name": "adakv", "budget": 8, "window": 4}
CODED = {"name": "spindlekv", "flush_every": 16, "ratio": 0.5, "raw_fallback": False}
MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"async_scheduling": True},
    "replayed": {"cudagraph_capture_sizes": (3, 8)},
    "guessing": {"speculative_config": SPECULATIVE},
}
CASES = [
    ("plain", "none"),
    ("plain", {**KARA, "period": 1}),
    ("plain", RECOMPUTING),
    (
        "plain",
        {"name": "snapkv", "budget": 14, "window": 4, "trigger": "threshold", "threshold": 30},
    ),
    ("plain", H2O),
    ("plain", {"name": "keydiff", "budget": 20, "recent": 4, "mode": "block"}),
    ("overlapped", {**KARA, "period": 1}),
    ("overlapped", RECOMPUTING),
    ("overlapped", PER_HEAD),
    ("overlapped", CODED),
    ("replayed", H2O),
    ("replayed", {**KARA, "period": 1}),
    ("replayed", CODED),
    ("guessing", "none"),
    ("guessing", {**KARA, "period": 1}),
]
NEEDS_COMPILER = pytest.mark.compiler  # rows are equal to the last bit in every batch


@thinned(
    {
        "mode,policy": [
            case if case[0] in ("plain", "guessing") else pytest.param(*case, marks=NEEDS_COMPILER)
            for case in CASES
        ],
        "swap_space": [0, 1 / 2048],
    }
)
def test_a_tiny_pool_gives_the_tokens_of_an_ample_one(
    llama_dir: Path, mode: str, policy: Any, swap_space: float
) -> None:
    """Whatever is freed, on the device or the host, is overwritten at once. Sequences make way
    while a token of theirs is unknown, or between replays; nobody makes way for guesses."""
    expected = generate(make_llm(llama_dir, policy))
    apart = policy in (PER_HEAD, CODED)
    size, blocks = 16 if policy == CODED else 4, 56 * (4 if apart else 1)
    how = {"block_size": size, "num_gpu_blocks_override": blocks, "swap_space": swap_space}
    tight = make_llm(llama_dir, policy, **how, **MODES[mode])
    watch(tight)
    core = tight.engine.core
    preempt_now_and_then(core.scheduler, np.random.default_rng(0), 0.1)
    oracle = Oracle(tight, expected.__getitem__, 0.8) if mode == "guessing" else None
    before = addresses(core.runner)
    assert generate(tight) == expected
    stats = tight.stats()
    assert stats.preemptions_total > 0 and stats.early_compactions_total == 0
    released = sum(counts.blocks_released for counts in stats.compaction_counts)
    assert released == stats.blocks_released_total
    assert bool(stats.compactions_total) == (policy != "none")
    assert policy == CODED or bool(stats.swaps_total) == bool(swap_space and policy != "none")
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert oracle is None or oracle.guessed > oracle.confirmed > 50
    assert addresses(core.runner) == before, "graphs and tapes go on reading there"
    graphs = core.runner.graphs
    assert mode != "replayed" or (isinstance(graphs, DecodeGraphs) and graphs.replays > 30)


_FEW: dict[str, Any] = {"kv_cache_dtype": "3bit"}
_REST = {"name": "kara", "window": 48, "buffer": 16, "ratio": 0.25, "period": 8, "rest_bits": 1.25}
_OVER: dict[str, Any] = {"budget": 40, "threshold": 64, "trigger": "threshold", "recent": 16}
CROWDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    **{name: ("llama", {"block_size": UNEVEN_BLOCK}, UNEVEN_CASES[name]) for name in UNEVEN_CASES},
    "codes": ("llama", {"block_size": UNEVEN_BLOCK}, {**CODED, "theta_k": 0.6, "theta_v": 0.5}),
    "newest, by layer": ("qwen3", {**_FEW, "kv_layout": "layer"}, UNEVEN_CASES["pyramidkv"]),
    "newest, by head": ("qwen3", {**_FEW, "kv_layout": "head"}, UNEVEN_CASES["adakv"]),
    "rest": ("qwen3", _FEW, _REST),
    "rest of keydiff": ("qwen3", _FEW, {"name": "keydiff", **_OVER, "rest_bits": 1.25}),
}
"""A checkpoint, settings and a policy: lengths that differ, codes, and entries in few bits, which
conformance's matrix has not."""
_CODED = ("codes", "rest", "rest of keydiff")
"""On CPUs compiled kernels alone read what an event leaves in codes."""


@pytest.mark.usefixtures("few_newest", "some_text")
@pytest.mark.parametrize(
    ("kind", "settings", "policy"),
    [
        pytest.param(*case, id=name, marks=NEEDS_COMPILER if name in _CODED else ())
        for name, case in CROWDS.items()
    ],
)
def test_alone_and_in_a_crowd(
    kind: str, settings: dict[str, Any], policy: dict[str, Any], tmp_path: Path
) -> None:
    """Beside others, in chunks, with guesses, hits, swaps and recomputation: the same tokens; no
    block is lost, and free ones that hold numbers are spoilt at once."""
    directory = write_checkpoint(kind, tmp_path, **({"head_dim": 64} if kind == "qwen3" else {}))
    prompts = random_prompts([70, 23, 41, 5], seed=5)
    settings = {"kv_cache_memory": 2**23, "max_num_batched_tokens": 99, **settings}
    alone = make_llm(directory, policy, **settings, max_num_seqs=1, enable_prefix_caching=False)
    expected = tokens_of(alone, prompts, 60) * 2
    whole = policy["name"] == "pyramidinfer"  # its prompts are computed in one step
    for tokens, swap_space in ((99, 1 / 256), (99 if whole else 17, 0)):
        how = {**settings, "max_num_batched_tokens": tokens, "swap_space": swap_space}
        crowd = make_llm(directory, policy, speculative_config=SPECULATIVE, **how)
        if kind == "llama":
            watch(crowd)
        scheduler = crowd.engine.core.scheduler
        preempt_now_and_then(scheduler, np.random.default_rng(0), 0.1)
        oracle = Oracle(crowd, expected.__getitem__, 0.8)
        assert tokens_of(crowd, prompts * 2, 60) == expected
        assert oracle.guessed > oracle.confirmed > 50
        assert scheduler.totals.preemptions_total > 3
        assert scheduler.blocks.headroom == scheduler.pool.capacity
        scheduler.check_integrity()


def addresses(runner: ModelRunner) -> list[int]:
    """Where all that steps read and write lies."""
    tensors = [x for x in vars(runner.batch).values() if isinstance(x, torch.Tensor)]
    return [tensor.data_ptr() for tensor in [*tensors, runner.cache.kv]]


@pytest.mark.parametrize("fields", [{"period": 25}, {"preset": "paper", "period": 7}])
def test_events_that_depend_on_others_leave_what_a_dense_replay_has(
    llama_dir: Path, fields: dict[str, Any]
) -> None:
    """Early events and the paper's engine-wide ones: the logits of the recorded kept sets."""
    recorder = Recorder(
        make_llm(
            llama_dir,
            {**KARA, "remainder": "off", **fields},
            block_size=4,
            num_gpu_blocks_override=60,
            swap_space=0,
        )
    )
    tokens = generate(recorder.llm)
    stats = recorder.llm.stats()
    assert stats.preemptions_total > 0 and stats.compactions_total > len(PROMPTS)
    assert ("preset" in fields) or stats.early_compactions_total > 0
    counted = {counts.reason: counts.events for counts in stats.compaction_counts}
    assert counted.get("pressure", 0) == stats.early_compactions_total
    assert sum(counted.values()) == stats.compactions_total
    model = load_dense(llama_dir)
    for seq_id, (prompt, more) in enumerate(zip(PROMPTS, tokens, strict=True)):
        record = recorder.records[seq_id]
        dense = dense_pass(model, prompt + more[:-1], record.events)
        logits = torch.stack(recorder.logits[seq_id])
        torch.testing.assert_close(logits, dense.logits[len(prompt) - 1 :], atol=2e-4, rtol=2e-4)


def test_branches_hold_one_copy_of_a_prompt_that_a_policy_cuts(llama_dir: Path) -> None:
    """n = 4 under a prefill policy: the prompt is stored once until each branch has its own cut."""
    (prompt,) = random_prompts([64], seed=7)
    llm = make_llm(llama_dir, {"name": "snapkv", "budget": 16, "window": 4}, block_size=4)
    pool, used = llm.engine.core.scheduler.pool, list[int]()
    before_steps(llm, lambda _: used.append(pool.capacity - pool.num_free))
    params = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=20, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert all(len(branch.token_ids) == 20 for branch in output.outputs)
    details = output.kv_cache_details
    assert details is not None and details.compactions > 0
    one_prompt, one_cut = 64 // 4, 16 // 4
    logs = 4 * 2  # the last four queries of each branch
    assert max(used) <= one_prompt + 4 * (one_cut + 20 // 4 + 1) + logs


def test_nothing_stays_of_a_parked_sequence_that_is_aborted(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, {"name": "h2o", "budget": 12}, swap_space=1 / 2048)
    engine, scheduler = llm.engine, llm.engine.core.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    for name, prompt in zip("ab", PROMPTS[2:], strict=False):
        engine.add_request(name, prompt, params)
    for _ in range(4):
        engine.step()
    preempt_now_and_then(scheduler, np.random.default_rng(0), 1.0)
    scheduler._admission.admit = lambda seq, budget: False  # type: ignore[method-assign]
    engine.step()
    parked = engine.core.runner.batch.kept_scores()._parked
    assert scheduler.totals.swaps_total == len(parked) == 1
    engine.abort_request("b")
    engine.step()
    assert not parked and scheduler.saved.host_pool.num_free == scheduler.saved.host_pool.capacity


@pytest.mark.parametrize(
    ("policy", "found"),
    [("none", 70 + 59), ({"name": "kara", "window": 32, "buffer": 8, "period": 8}, 70)],
)
def test_a_follow_up_turn_finds_the_answer_it_continues(
    llama_dir: Path, policy: Any, found: int
) -> None:
    """Under Kara the answer's blocks no longer name its tokens: only the prompt is found."""
    prompt, more = random_prompts([70, 5])
    llm = make(llama_dir, policy=policy)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    (first,) = llm.generate([prompt], params, use_tqdm=False)
    talk = prompt + first.outputs[0].token_ids + more
    (second,) = llm.generate([talk], params, use_tqdm=False)
    assert second.num_cached_tokens == found // 16 * 16
