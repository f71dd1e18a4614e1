"""Models some of whose layers keep states: transformers' logits and tokens, however their rows are
computed, beside whom, and after whatever has happened to them."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvserve import LLM, SamplingParams
from kvserve.config import ModelConfig
from kvserve.engine.models import delta_layers
from kvserve.engine.models.delta_layers import DeltaTransformer
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.recurrent import Recurrent
from kvserve.engine.runner.cuda_graph import DecodeGraphs
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.layer.gated_delta import RowChunks
from kvserve.log import ConfigError
from tests.checkpoints import edit_config, edited_tensors, random_prompts
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models import decoding
from tests.engine.models.decoding import (
    answers_beside,
    check_away,
    check_parity,
    make,
    row_of,
    tokens,
    wrap,
)
from tests.engine.models.hybrids import FAMILIES, OURS, expected, write_hybrid
from tests.engine.recorder import Recorder
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow
from tests.waiting import WAIT

PROMPTS = random_prompts([5, 60, 1, 33, 130, 64, 7, 90])
TOKENS = 64
DELTA = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
"""Their gated norms divide by what is nearly nothing in a random model."""
THEIRS = "-theirs"
"""Behind the name of a family that has layers of our own: on transformers' modules instead."""
QUICK = ["qwen3_5_text", "qwen3_5_moe_text", "falcon_h1", "lfm2"]
"""One of each kind of state: the delta rule, Mamba 2 beside attention, a convolution alone."""
OTHERS = [*FAMILIES, *(kind + THEIRS for kind in sorted(OURS))]
TWO_FORMS = "nemotron_h"
"""Its time step has a least value in calls of many tokens, and none in those of one."""

every_family = pytest.mark.parametrize(
    "kind", [*QUICK, *slow(*(kind for kind in OTHERS if kind not in QUICK))]
)


def within(kind: str) -> float:
    return 2e-3 if kind.removesuffix(THEIRS) in DELTA else 1e-4


def engine_of(kind: str) -> dict[str, Any]:
    """Settings of an engine of a family."""
    return {"model_impl": "transformers" if kind.endswith(THEIRS) else "auto"}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {}


@pytest.fixture
def directory(
    kind: str, written: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    kind = kind.removesuffix(THEIRS)
    if kind not in written:
        written[kind] = write_hybrid(kind, tmp_path_factory.mktemp(kind))
    return written[kind]


@every_family
def test_a_crowd_of_unequal_rows(kind: str, directory: Path) -> None:
    # The one token of a prompt is a call of many there, and here a step.
    prompts = [ids for ids in PROMPTS if len(ids) > 1 or kind != TWO_FORMS]
    wanted = expected(directory, prompts, TOKENS)
    settings = {"max_num_seqs": 8, **engine_of(kind)}
    llm = check_parity(directory, prompts, wanted, within(kind), **settings)
    runs_on = DeltaTransformer if kind in OURS else Recurrent
    assert isinstance(llm.engine.core.runner.model, runs_on)
    assert llm.stats().steps_total < 80, "they decode together"


@pytest.mark.parametrize("chunk", [7, 64])
@every_family
def test_chunks(kind: str, chunk: int, directory: Path) -> None:
    """Each alone, so that its chunks are those of the reference."""
    prompts = [PROMPTS[at] for at in (1, 4)]
    wanted = expected(directory, prompts, 16, chunk)
    settings = {"max_num_batched_tokens": chunk, "max_num_seqs": 1, **engine_of(kind)}
    check_parity(directory, prompts, wanted, within(kind), **settings)


@every_family
def test_what_happens_beside_a_row_and_to_it(kind: str, directory: Path) -> None:
    """Chunks beside decodes, aborts, and rows that are preempted and computed again."""
    wanted = expected(directory, PROMPTS[:5], 32)
    settings = {"max_num_batched_tokens": 48, "max_num_seqs": 6, **engine_of(kind)}
    llm = make(directory, async_scheduling=True, **settings)
    core = llm.engine.core
    if kind != TWO_FORMS:
        preempt_now_and_then(core.scheduler, np.random.default_rng(0), 0.1)
    # In its prompt, and as they decode.
    found = answers_beside(llm, PROMPTS, 32, {3: 7, 9: 5, 14: 6})
    assert bool(llm.stats().preemptions_total) == (kind != TWO_FORMS)
    assert found == [one.token_ids for one in wanted]


@pytest.mark.parametrize("count", [20, *slow(300)])
@pytest.mark.parametrize("kind", QUICK)
def test_a_small_pool_gives_what_a_request_gives_alone(
    kind: str, count: int, directory: Path
) -> None:
    """Random lengths, choices and priorities; the pool holds a few of them, and rows make way."""
    rng = np.random.default_rng(1)
    prompts = random_prompts(rng.integers(1, 60, count).tolist(), seed=9)
    params = [
        SamplingParams(
            temperature=float(rng.integers(2)),
            seed=int(rng.integers(99)),
            max_tokens=int(rng.integers(1, 24)),
            n=int(rng.choice([1, 1, 1, 2])),
            ignore_eos=True,
        )
        for _ in prompts
    ]

    def run(preempted: float, **settings: Any) -> tuple[LLM, list[list[list[int]]]]:
        llm = make(directory, block_size=8, **settings, **engine_of(kind))
        preempt_now_and_then(llm.engine.core.scheduler, rng, preempted)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return llm, [[list(one.token_ids) for one in each.outputs] for each in outputs]

    alone, wanted = run(0.0, max_num_seqs=1)
    assert not alone.stats().preemptions_total
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 18}
    small, found = run(0.1, **sizes)
    assert small.stats().preemptions_total > count // 5
    assert found == wanted
    scheduler = small.engine.core.scheduler
    scheduler.check_integrity()
    assert scheduler.blocks.headroom == scheduler.pool.capacity


HISTORY = random_prompts([200], seed=3)[0]
"""Keeps the state of its first 192 tokens."""


@every_family
def test_a_crowd_that_begins_with_kept_states(kind: str, directory: Path) -> None:
    """Later turns, one of them of two tokens, beside rows that begin anew."""
    turns = [HISTORY[:192] + more for more in random_prompts([2, 8, 50, 64, 130], seed=4)]
    prompts = [*turns, *PROMPTS[3:5]]
    wanted = expected(directory, prompts, 24)
    llm = make(directory, max_num_seqs=8)
    tokens(llm, [HISTORY], 4)
    recorder = Recorder(llm)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert [each.num_cached_tokens for each in found] == [192] * 5 + [0, 0]
    # OLMo's delta rule is 1.5e-4 apart in one of these rows without a kept state, too.
    atol = max(within(kind), 2e-3 * (kind == "olmo_hybrid"))
    for i, (output, one) in enumerate(zip(found, wanted, strict=True)):
        assert list(output.outputs[0].token_ids) == one.token_ids
        logits = torch.stack(recorder.logits[1 + i])
        torch.testing.assert_close(logits, one.logits, atol=atol, rtol=0.0)


def leave_now_and_then(llm: LLM, rng: np.random.Generator, probability: float) -> None:
    """As ``preempt_now_and_then``, and half of those that leave are held to be compressed, so that
    they go to host memory."""
    scheduler = llm.engine.core.scheduler
    preempt, rows = scheduler.departures.preempt, scheduler.rows

    def with_blocks() -> None:
        rows.compactions[: rows.num_rows] = rng.integers(2)
        preempt()

    scheduler.departures.preempt = with_blocks  # type: ignore[method-assign]
    preempt_now_and_then(scheduler, rng, probability)


@every_family
def test_rows_that_were_away(kind: str, directory: Path) -> None:
    """In host memory, as they decode: they come back bit for bit."""
    prompts = PROMPTS[3:7]
    check_away(directory, prompts, expected(directory, prompts, 40), within(kind))


@pytest.mark.parametrize("count", [24, *slow(300)])
@pytest.mark.parametrize("kind", QUICK)
def test_shared_prefixes_on_a_small_pool(kind: str, count: int, directory: Path) -> None:
    """Turns of conversations, aborts, and rows that leave: answers are those of each alone, and of
    no prefix cache."""
    rng = np.random.default_rng(5)
    roots = random_prompts([70, 130, 200], seed=6)
    prompts = list[list[int]]()
    for more in random_prompts(rng.integers(1, 50, count).tolist(), seed=7):
        known = [*roots, *(each for each in prompts[-6:] if len(each) < 300)]
        prompts.append(known[int(rng.integers(len(known)))] + more)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

    def run(llm: LLM, aborts: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for at, prompt in enumerate(prompts):
            llm.engine.add_request(str(at), prompt, params)
            for _ in range(2):
                for output in llm.engine.step():
                    if output.finished:
                        found[int(output.request_id)] = list(output.outputs[0].token_ids)
            if aborts and at % 9 == 8:
                llm.engine.abort_request(str(at - 1))
        while llm.engine.has_unfinished_requests:
            for output in llm.engine.step():
                if output.finished:
                    found[int(output.request_id)] = list(output.outputs[0].token_ids)
        llm.engine.core.scheduler.check_integrity()
        return found

    wanted = run(make(directory, max_num_seqs=1, enable_prefix_caching=False), aborts=False)
    small = make(directory, max_num_seqs=6, max_num_batched_tokens=96, num_gpu_blocks_override=70)
    leave_now_and_then(small, rng, 0.05)
    found = run(small, aborts=True)
    stats = small.stats()
    assert stats.swaps_total and stats.preemptions_total > stats.swaps_total
    assert stats.kept_state_bytes > 0 and len(found) > count * 0.8
    assert [found[at] for at in sorted(found)] == [wanted[at] for at in sorted(found)]
    scheduler = small.engine.core.scheduler
    assert scheduler.blocks.headroom == scheduler.pool.capacity


def test_usage_and_metrics_count_states(tmp_path: Path) -> None:
    """Two layers of [128, 3] and [4, 16, 16] numbers in float32, and one that has a cache."""
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    directory = write_hybrid("qwen3_5_text", tmp_path, num_hidden_layers=3, layer_types=kinds)
    row_bytes = 2 * 4 * (128 * 3 + 4 * 16 * 16)
    llm = make(directory, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, n=2)
    for at in range(2):
        llm.engine.add_request(str(at), PROMPTS[at], params)
    llm.engine.step()
    assert llm.stats().state_bytes == 4 * row_bytes
    ended: dict[str, Any] = {}
    while llm.engine.has_unfinished_requests:
        ended |= {each.request_id: each for each in llm.engine.step() if each.finished}
    for output in ended.values():
        assert output.kv_cache_details.state_bytes == 2 * row_bytes
        tokens_read = 2 * (len(output.prompt_token_ids) + 8)
        assert output.kv_cache_details.held_entries == tokens_read * 2  # KV heads of one layer
    assert llm.stats().state_bytes == 0
    assert llm.stats().kept_state_bytes == 0, "no prompt has 64 tokens"
    tokens(llm, [PROMPTS[4]], 2)
    assert llm.stats().kept_state_bytes == row_bytes
    ours, kept = 4 * row_bytes / 2**20, 16 * row_bytes / 2**20
    said = f"{ours:.1f} MiB and {kept:.1f} MiB kept for later prompts"
    assert row_of(llm, "states")[1].endswith(said)


def test_what_states_rule_out_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_hybrid("lfm2", tmp_path)
    with caplog.at_level(logging.INFO, "kvserve"):
        llm = make(directory)
        assert not any("prefix caching is off" in line for line in caplog.messages)
        without = make(directory, kv_cache_memory=6000, max_num_seqs=1, block_size=4)
    assert any("prefix caching is off: a quarter" in line for line in caplog.messages)
    state, why = row_of(llm, "prefix caching")[1:]
    assert state == "on" and "at the last 64 tokens of a prompt" in why
    assert row_of(without, "prefix caching")[1] == "off"
    assert row_of(llm, "preemption")[1].startswith("swap to ")
    guesses = {"method": "ngram", "num_speculative_tokens": 2}
    recompute = {"name": "kara", "query_source": "recompute"}
    for settings, message in (
        ({"continuations": "on"}, "--continuations on: the layers with states of Lfm2ForCausalLM"),
        ({"speculative_config": guesses}, "--speculative-config: .* cannot take back a guess"),
        ({"policy": recompute}, "query_source recompute wants what windows and states"),
        ({"policy": "spindlekv"}, "spindlekv is not built for layers with sliding windows or"),
        ({"policy": "pyramidinfer"}, "pyramidinfer prunes between layers"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: Lfm2ForCausalLM"),
        ({"kv_cache_memory": 1000}, "--kv-cache-memory: nothing is left for blocks: 256 rows"),
        (
            {"max_num_seqs": 10**8, "max_num_batched_tokens": 10**8},
            "--max-num-seqs: .* GiB of memory are free, and 100000000 rows",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            make(directory, **settings)


def test_memory_for_the_cache_counts_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 100 rows, and 50 that are kept; what is asked for, and what an engine takes by itself: a
    quarter of what is left."""
    directory, mib = write_hybrid("lfm2", tmp_path), 2**20
    row_bytes = 3 * 64 * 2 * 4

    def blocks(free: int, **settings: Any) -> int:
        for module in ("state_plan", "rank"):
            monkeypatch.setattr(f"kvserve.engine.runner.{module}.free_memory", lambda *_: free)
        core = make(directory, max_num_seqs=100, **settings).engine.core
        return (core.scheduler.pool.capacity + 1) * core.runner.cache.kv[0].nbytes

    block_bytes = 2 * 2 * 16 * 4 * 16  # keys and values of 16 tokens
    wanted = mib - 150 * row_bytes
    assert blocks(2**33, kv_cache_memory=mib) == wanted // block_bytes * block_bytes
    wanted = (4 * mib - 150 * row_bytes) // 4
    assert blocks(4 * mib) == wanted // block_bytes * block_bytes


@pytest.fixture
def kernels_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install -e '.[dev]'")
    monkeypatch.setattr(delta_layers, "on_gpu", lambda x: True)


@pytest.mark.parametrize("right", [0.7, *slow(0.0, 1.0)])
@pytest.mark.parametrize("kind", ["qwen3_5_text", *slow("qwen3_5_moe_text", "qwen3_next")])
def test_guesses_are_taken_back(kind: str, right: float, directory: Path) -> None:
    """Beside chunks of prompts, and rows that leave: the tokens of an engine without guesses."""
    prompts = [*PROMPTS, HISTORY[:192] + PROMPTS[0], HISTORY]
    wanted = tokens(make(directory, max_num_seqs=1), prompts, 48)
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    llm = make(directory, speculative_config=SPECULATIVE, **settings)
    oracle = Oracle(llm, wanted.__getitem__, right)
    leave_now_and_then(llm, np.random.default_rng(2), 0.2)
    assert tokens(llm, prompts, 48) == wanted
    stats = llm.stats()
    assert stats.swaps_total and stats.preemptions_total > stats.swaps_total
    assert oracle.guessed > 100 and abs(oracle.confirmed / oracle.guessed - right**2) < 0.31
    llm.engine.core.scheduler.check_integrity()


@pytest.mark.usefixtures("kernels_of_gpus")
def test_guesses_are_taken_back_on_a_gpu(tmp_path: Path) -> None:
    kinds, prompts = ["linear_attention", "full_attention"], [[5, 6, 7], HISTORY[:20]]
    directory = write_hybrid("qwen3_5_text", tmp_path, num_hidden_layers=2, layer_types=kinds)
    wanted = tokens(make(directory), prompts, 12)
    llm = make(directory, speculative_config=SPECULATIVE, max_num_seqs=2)
    oracle = Oracle(llm, wanted.__getitem__, 0.7)
    assert tokens(llm, prompts, 12) == wanted
    assert oracle.guessed > oracle.confirmed > 5


@pytest.mark.usefixtures("kernels_of_gpus")
def test_states_beside_entries_in_few_bits_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept of rows so short that all their entries are read as they were computed."""
    kinds, prompts = ["linear_attention", "full_attention"], [[5, 6, 7], HISTORY[:20]]
    directory = write_hybrid("qwen3_5_text", tmp_path, num_hidden_layers=2, layer_types=kinds)
    llm = make(directory, kv_cache_dtype="3bit", cudagraph_capture_sizes=(2,))
    launch, rows = Kernel.launch, list[list[int]]()

    def watched(kernel: Kernel, *args: Any, **options: Any) -> None:
        if kernel.source.__name__ == "_by_steps":
            rows.append(args[7].tolist())
        launch(kernel, *args, **options)

    monkeypatch.setattr(Kernel, "launch", watched)
    tokens(llm, prompts, 6)
    assert rows == [[0, 1]] * 6


@pytest.mark.parametrize("kernels", [None, "kernels_of_gpus"])
def test_states_behind_guesses_are_those_of_single_tokens(
    kernels: str | None, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """To the last bit: of the first of three chunks two tokens count, of the last one one."""
    if kernels:
        request.getfixturevalue(kernels)
    llm = make(write_hybrid("qwen3_5_text", tmp_path), max_num_seqs=3)
    model: Any = llm.engine.core.runner.model
    layer, states = model.layers[0], next(iter(model.states.values()))[0]
    for part in states:
        part.normal_()
    before = [part[:3].clone() for part in states]
    x, counted = torch.randn(8, 64), [(0, [0, 1]), (1, [4]), (2, [5])]
    chunks = RowChunks(torch.arange(3), torch.tensor([0, 4, 5, 8]), 4)
    rows, ends = [0, -1, -1, -1, 2, -1], [0, 2, 4, 5, 5, 6, 8]
    counts = RowChunks(torch.tensor(rows), torch.tensor(ends), 4)
    with torch.inference_mode():
        layer(x, None, states, chunks, guessing=3)
        layer.take_back(states, torch.tensor([True, False, True]), counts)
        found = [part[:3].clone() for part in states]
        for part, numbers in zip(states, before, strict=True):
            part[:3] = numbers
        for row, true in counted:
            one = RowChunks(torch.tensor([row]), torch.tensor([0, 1]), 1)
            for token in true:
                layer(x[token : token + 1], None, states, one)
    for part, numbers in zip(states, found, strict=True):
        assert torch.equal(part[:3], numbers)


@pytest.mark.parametrize("dtype", ["int8", *slow("3bit")])
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "kara", "window": 12, "buffer": 4, "ratio": 0.3, "period": 1},
        *slow(
            {"name": "snapkv", "budget": 32, "window": 8},
            {"name": "chunkkv", "budget": 32, "window": 8},
        ),
    ],
    ids=lambda policy: policy["name"],
)
def test_events_beside_others_on_our_own_layers(
    policy: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    """Entries in levels, and compacted: in a crowd, in chunks and after preemptions every request
    gets the tokens that it gets alone."""
    directory = write_hybrid("qwen3_5_text", tmp_path)
    settings = {"policy": policy, "kv_cache_dtype": dtype, "block_size": 32}
    wanted = [tokens(make(directory, max_num_seqs=1, **settings), [ids], 32) for ids in PROMPTS[:5]]
    llm = make(directory, max_num_seqs=5, max_num_batched_tokens=40, **settings)
    assert isinstance(llm.engine.core.runner.model, DeltaTransformer)
    preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.05)
    assert tokens(llm, PROMPTS[:5], 32) == [one for (one,) in wanted]
    stats = llm.stats()
    assert stats.compactions_total and stats.preemptions_total and stats.swaps_total


@pytest.mark.usefixtures("kernels_of_gpus")
def test_kernels_for_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU would run them: decoding steps padded as for graphs and one ahead of the host.
    Padding is of no row."""
    directory = write_hybrid("qwen3_5_text", tmp_path)
    wanted, seen = expected(directory, PROMPTS[:4], 10), set[str]()
    launch = Kernel.launch

    def watched(kernel: Kernel, *args: Any, **options: Any) -> None:
        name = kernel.source.__name__
        seen.add(name)
        if name == "_by_steps" and (args[7] < 0).any():  # rows
            seen.add("padding")
        launch(kernel, *args, **options)

    monkeypatch.setattr(Kernel, "launch", watched)
    settings: dict[str, Any] = {"cudagraph_capture_sizes": (4,), "max_num_batched_tokens": 40}
    how = {"async_scheduling": True, "max_num_seqs": 4, **settings}
    llm = check_parity(directory, PROMPTS[:4], wanted, within("qwen3_5_text"), **how)
    assert seen == {"_convolve", "_by_pieces", "_by_steps", "_gate", "padding"}
    graphs = llm.engine.core.runner.graphs
    assert isinstance(graphs, DecodeGraphs) and graphs.replays


def test_what_our_own_layers_do_not_run_goes_to_transformers(tmp_path: Path) -> None:
    """Named if ours were asked for."""
    directory = write_hybrid("qwen3_5_text", tmp_path)

    def chosen(device: str = "cpu", **settings: Any) -> Any:
        return choose_spec(directory, ModelConfig(model=str(directory), **settings), device)

    assert not chosen().borrowed and not chosen(dtype="bfloat16").borrowed
    for device, settings, why in (
        ("cpu", {"dtype": "float16"}, "kernels take float32 and bfloat16, not float16"),
    ):
        assert chosen(device, **settings).borrowed
        with pytest.raises(ConfigError, match=f"--model-impl native: Qwen3_5ForCausalLM .*{why}"):
            chosen(device, model_impl="native", **settings)
    scaled = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    edit_config(directory, rope_parameters=scaled)
    assert chosen().borrowed
    plain = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.3}
    edit_config(directory, rope_parameters=plain)
    with pytest.raises(ConfigError, match=r"rotates 4\.8 of 16 dimensions of a head"):
        chosen()
    plain["partial_rotary_factor"] = 0.5
    edit_config(directory, rope_parameters=plain, layer_types=["linear_attention"] * 4)
    with pytest.raises(ConfigError, match="has no layer with keys and values"):
        chosen()
    edit_config(directory, layer_types=["linear_attention"] * 3)
    with pytest.raises(ConfigError, match=r"has layer_types .* for 4 layers"):
        chosen()


def test_rates_stay_as_exact_as_the_file_has_them(tmp_path: Path) -> None:
    """In bfloat16 too; and what guesses further tokens is not read. The head is the embedding, and
    config.json names no architecture."""
    directory = write_hybrid("qwen3_5_text", tmp_path, tie_word_embeddings=True)
    edit_config(directory, architectures=None)
    with edited_tensors(directory) as stored:
        stored["mtp.fc.weight"] = torch.zeros(2, 2)
        names = [f"model.layers.0.linear_attn.{name}" for name in ("A_log", "dt_bias")]
        wanted = torch.stack([stored[name].float() for name in names])
    llm = make(directory, dtype="bfloat16")
    layer: Any = llm.engine.core.runner.model.layers[0]
    assert torch.equal(layer.decay, wanted) and layer.scale.dtype is torch.bfloat16
    assert not torch.equal(wanted, wanted.bfloat16().float())
    assert len(tokens(llm, PROMPTS[:2], 8)[0]) == 8


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """As they are published; transformers writes them one by one."""
    directory = write_hybrid("qwen3_5_moe_text", tmp_path)
    wanted = tokens(make(directory), PROMPTS[:2], 8)
    with edited_tensors(directory) as stored:
        for layer in range(4):
            every = f"model.layers.{layer}.mlp.experts."
            gate, up, down = (
                torch.stack([stored.pop(f"{every}{n}.{part}_proj.weight") for n in range(4)])
                for part in ("gate", "up", "down")
            )
            stored[f"{every}gate_up_proj"] = torch.cat([gate, up], dim=1)
            stored[f"{every}down_proj"] = down
    assert tokens(make(directory), PROMPTS[:2], 8) == wanted


@pytest.mark.parametrize("normalised", [True, False])
def test_qwen3_next_with_experts(tmp_path: Path, *, normalised: bool) -> None:
    """In all layers; where some have none, transformers' modules run it."""
    fields = {"mlp_only_layers": [], "norm_topk_prob": normalised}
    directory = write_hybrid("qwen3_next", tmp_path, **fields)
    llm = check_parity(directory, PROMPTS[:4], expected(directory, PROMPTS[:4], 24), 2e-3)
    assert isinstance(llm.engine.core.runner.model, DeltaTransformer)
    edit_config(directory, mlp_only_layers=[1])
    assert choose_spec(directory, ModelConfig(model=str(directory))).borrowed
    with pytest.raises(ConfigError, match="experts and layers without, which is not built"):
        choose_spec(directory, ModelConfig(model=str(directory), model_impl="native"))


def test_a_wrapper_serves_its_text(tmp_path: Path) -> None:
    """Qwen 3.5 is published as one that also sees; names of its file begin otherwise."""
    directory = write_hybrid("qwen3_5_text", tmp_path)
    wanted = tokens(make(directory), PROMPTS[:2], 8)
    wrap("qwen3_5", "Qwen3_5ForConditionalGeneration", directory)
    assert tokens(make(directory), PROMPTS[:2], 8) == wanted


def test_layers_with_states_alone_are_refused(tmp_path: Path) -> None:
    directory = write_hybrid("lfm2", tmp_path)
    edit_config(directory, layer_types=["conv"] * 4)
    with pytest.raises(ConfigError, match="Lfm2ForCausalLM: none of its layers has keys"):
        choose_spec(directory, ModelConfig(model=str(directory)))


def test_nothing_of_states_is_loaded_for_a_model_without(tmp_path: Path) -> None:
    """That of our own layers: tests/import_budget.json."""
    config = AutoConfig.for_model("gpt2", **decoding.SHAPE)
    decoding.write(AutoModelForCausalLM, config, tmp_path)
    script = """
        import sys
        from kvserve import LLM
        LLM(sys.argv[1], skip_tokenizer_init=True).generate([[5, 6, 7]], use_tqdm=False)
        print(*(name for name in sys.modules if name.startswith("kvserve.")))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split()}
    assert "borrowed" in loaded
    assert not {name for name in loaded if name.startswith(("recurrent", "state_", "kept_states"))}
