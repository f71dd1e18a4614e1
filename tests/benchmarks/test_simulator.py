"""The simulator loses no token and no block, schedules as the engine does, and costs what was
worked out by hand for two known models on a device that reads 4 TB/s and computes 600 TFLOP/s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM
from kvserve.benchmarks.datasets.workload import random_prompts
from kvserve.benchmarks.measuring.measure import play
from kvserve.benchmarks.setup.lengths import lognormal_lengths
from kvserve.benchmarks.simulator.cost_model import DEVICES, LARGE_SHAPES, CostModel, Queries
from kvserve.benchmarks.simulator.scenario import Scenario
from kvserve.benchmarks.simulator.simulator import Simulation
from kvserve.engine.cache.query_log import LogForm
from kvserve.engine.models.spec import parse_spec
from kvserve.engine.policies.registry import make_policy
from kvserve.kernels.entry_format import entry_format
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import CompactionTask
from kvserve.scheduler.step.scheduler import Scheduler
from kvserve.scheduler.step.settings import SchedulerSettings
from kvserve.scheduler.triggers.periodic import EngineWide, Periodic
from kvserve.scheduler.triggers.trigger import EvictionSpec, Never, Trigger, WhenOver
from tests.test_architecture import loaded_by

LLAMA, QWEN, _, GPT_OSS = LARGE_SHAPES
NO_QUERIES = Queries("none")


def cost_model(shape: str = LLAMA, device: str = "h200") -> CostModel:
    return CostModel(parse_spec(LARGE_SHAPES[shape], shape), DEVICES[device])


def make_scheduler(num_blocks: int, block_size: int = 16, **settings: object) -> Scheduler:
    defaults = {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,
        "max_model_len": 512,
        "log_block_tokens": 4 * block_size,
        "prefix_caching": False,
    }
    layout = KVLayout(2, 2, 8, block_size)
    made: dict[str, Any] = {**defaults, **settings, "num_blocks": num_blocks}
    return Scheduler(layout, SchedulerSettings(**made))


# ---- conservation -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "trigger",
    [
        Never(),
        Periodic(48, 8, 12, 8),
        Periodic(48, 8, 12, 8, logs=False),
        WhenOver(96, 64, 8, protect_prompt=False),
        EngineWide(64, 8, 16, 16, 3),
    ],
    ids=lambda trigger: type(trigger).__name__,
)
def test_all_tokens_are_delivered_and_all_blocks_come_back(trigger: Trigger) -> None:
    rng = np.random.default_rng(1)
    prompts = lognormal_lengths(rng, 40, 40, 0.5, 120)
    outputs = lognormal_lengths(rng, 40, 150, 0.7, 380)
    scheduler = make_scheduler(100)
    queries = Queries("log", 8)
    simulation = Simulation(scheduler, trigger, cost_model(), queries, prompts, outputs)
    times = [0.0]
    while simulation.unfinished:
        simulation.step()
        scheduler.check_integrity()
        times.append(simulation.now)
    figures = simulation.figures()
    assert (np.diff(times) >= cost_model().device.step_overhead).all()
    assert figures["simulated_s"] == times[-1]
    assert figures["output_tokens"] == outputs.sum()
    assert figures["output_tok_s"] == outputs.sum() / times[-1]
    lengths = {seq.seq_id: len(seq.token_ids) for seq in simulation.finished}
    assert lengths == dict(enumerate((prompts + outputs).tolist()))
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert (figures["compactions"] > 0) == (trigger != Never())
    assert (figures["held_over_logical"] < 1) == (trigger != Never())
    assert figures["mean_running"] <= figures["peak_running"] <= 16
    assert 0 < figures["mean_pool_usage"] < 1
    assert figures["itl_p50_ms"] <= figures["itl_p99_ms"] <= figures["itl_max_ms"]


def test_a_step_takes_what_the_cost_model_says() -> None:
    """A prompt of 20 tokens, then two decodes, with 21 and 22 entries to read."""
    scheduler, cost = make_scheduler(10), cost_model()
    one = np.array([20]), np.array([3])
    simulation = Simulation(scheduler, Never(), cost, NO_QUERIES, *one)
    figures = simulation.run()
    prefill = cost.step(20, 1, 20, 20 * 10)
    decodes = [cost.step(1, 1, held, 0) for held in (21, 22)]
    assert figures["simulated_s"] == pytest.approx(prefill + sum(decodes))
    assert figures["steps"] == 3 and figures["requests"] == 1
    assert figures["itl_max_ms"] == pytest.approx(1e3 * decodes[1])


def test_layers_with_windows_hold_and_read_no_more_than_a_window() -> None:
    """As many layers see 128 tokens as see all: a step reads 128 entries more."""
    cost = cost_model(GPT_OSS)
    assert (cost.entry_bytes, cost.window_entries) == (12 * 8 * 2 * 64 * 2, 128)
    scenario = Scenario(
        *("gpt-oss", "a card", cost, 16 * 80, 4, 512, 16, np.array([300]), np.array([300]))
    )
    scheduler = scenario.scheduler(log_block_tokens=16)
    simulation = Simulation(
        scheduler, Never(), cost, NO_QUERIES, scenario.prompts, scenario.outputs
    )
    simulation.step()
    assert simulation.now == pytest.approx(cost.step(300, 1, 300 + 128, 300 * (150 + 128)))
    before = simulation.now
    simulation.step()
    assert simulation.now - before == pytest.approx(cost.step(1, 1, 301 + 128, 0))
    for _ in range(290):
        simulation.step()
    used = scheduler.pool.capacity - scheduler.blocks.headroom
    assert used == -(-591 // 16) + 128 // 16 + 2  # one block more, and one that is begun


def test_a_prompt_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt of 200 tokens needs 13 blocks"):
        one = np.array([200]), np.array([5])
        Simulation(make_scheduler(10), Never(), cost_model(), NO_QUERIES, *one)


def test_lengths_have_their_mean_and_their_cap() -> None:
    lengths = lognormal_lengths(np.random.default_rng(0), 40_000, 1000, 0.7, 10**6)
    assert lengths.mean() == pytest.approx(1000, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.7, rel=0.02)
    rng = np.random.default_rng(0)
    assert lognormal_lengths(rng, 1000, 1000, 0.7, 900).max() == 900
    assert (lognormal_lengths(rng, 10, 64, 0.0, 900) == 64).all()


def test_it_loads_no_torch() -> None:
    loaded = loaded_by("kvserve.benchmarks.simulator.simulator")
    assert "numpy" in loaded and "torch" not in loaded


# ---- the engine's own schedule ------------------------------------------------------------------


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "none"},
        {"name": "kara", "window": 32, "buffer": 4, "ratio": 0.2, "period": 4, "chunk_budget": 2},
        {"name": "snapkv", "trigger": "threshold", "budget": 40, "threshold": 56, "window": 8},
    ],
    ids=lambda policy: str(policy["name"]),
)
def test_it_schedules_as_the_engine_does(model_dir: Path, policy: dict[str, object]) -> None:
    workload = random_prompts([(16, 96)] * 12, 258, seed=0)
    settings = {"max_num_seqs": 10, "max_num_batched_tokens": 40, "max_model_len": 256}
    llm = LLM(
        str(model_dir),
        load_format="dummy",
        skip_tokenizer_init=True,
        policy=policy,
        block_size=4,
        num_gpu_blocks_override=110,
        **settings,
    )
    measured = play(llm.engine, workload).figures
    made = make_policy(policy)
    layout = KVLayout(2, 2, 8, 4)
    form = LogForm(4, "int4" if policy["name"] == "kara" else "model")
    log_tokens = form.block_tokens(layout, entry_format("auto", 4), 4)
    blocks = {"num_blocks": 111, "num_host_blocks": 110, "log_block_tokens": log_tokens}
    made_of: dict[str, Any] = {**blocks, **settings}
    scheduler = Scheduler(layout, SchedulerSettings(**made_of))
    lengths = np.full(12, 16), np.full(12, 96)
    figures = Simulation(scheduler, made.event_trigger, cost_model(), NO_QUERIES, *lengths).run()
    assert figures["steps"] == measured["steps"] - 1  # the engine's last step drops the last row
    assert sequence_steps(figures) == sequence_steps(measured)
    for name in ("output_tokens", "compactions", "evicted_tokens", "preemptions"):
        assert figures[name] == measured[name], name
    assert (figures["compactions"] > 0) == (policy["name"] != "none")
    assert figures["preemptions"] > 0 or policy["name"] != "none"


def sequence_steps(figures: dict[str, Any]) -> int:
    return round(figures["mean_running"] * figures["steps"])


# ---- the cost model, by hand --------------------------------------------------------------------


def kara_events(count: int = 1, windows: int = 1) -> list[CompactionTask]:
    """Events of W 768, U 32, N 225 on sequences that hold 1,000 entries before them."""
    each = np.ones(count, np.int64)
    start, log_from = 1000 * each, 1968 * each
    lengths = (windows * each, 736 * each, 225 * each, start, 768 * each, 1736 * each)
    plan = EvictionSpec(start, *lengths)
    old = 1768 * each[None, :, None]
    new, blocks = old - plan.evicted[None, :, None], np.zeros((1, 1, 1, 1))
    return [CompactionTask(0, each, each, plan, old, None, new, start, blocks, log_from)]


def test_sizes_and_rates_of_known_models() -> None:
    llama, qwen = cost_model(), cost_model(QWEN)
    assert (llama.entry_bytes, qwen.entry_bytes) == (128 * 1024, 144 * 1024)
    spec, device = llama.spec, DEVICES["h200"]
    quantized = {name: CostModel(spec, device, name).entry_bytes for name in ("int8", "k8v4")}
    assert quantized == {"int8": 32 * 8 * 260, "k8v4": 32 * 8 * 198}
    assert CostModel(spec, device, "k8v4").weights_bytes == llama.weights_bytes
    assert llama.params == pytest.approx(7.50e9, rel=1e-3)
    assert (llama.recompute_params, qwen.recompute_params) == pytest.approx(
        (6.52e9, 3.36e9), rel=1e-3
    )
    for name, ridge in (("h200", 150), ("h100", 214), ("a100", 135)):
        cost = cost_model(device=name)
        assert cost.weights_s / cost.token_s == pytest.approx(ridge, rel=0.01)


def test_a_decode_step_reads_weights_and_cache() -> None:
    cost = cost_model()
    assert cost.step(144, 144, 335_000, 0) == pytest.approx(16.7e-3, rel=0.005)
    more = cost.step(300, 300, 335_000, 0) - cost.step(150, 150, 335_000, 0)
    assert more == pytest.approx(150 * cost.token_s)
    # Prefill: the head sees one token, and each pair of query and key takes 4 L Hq D operations.
    chunk = cost.step(2000, 1, 0, 10**6) - cost.step(1000, 1, 0, 0)
    pairs = 4 * 32 * 32 * 128 * 10**6 / 600e12
    assert chunk == pytest.approx(2 * 1000 * (7.504e9 - 0.5253e9) / 600e12 + pairs, rel=1e-3)


@pytest.mark.parametrize(
    ("shape", "gemm", "attention", "scoring"),
    [(LLAMA, 10.0, 0.56, 0.30), (QWEN, 5.2, 0.63, 0.33)],
)
def test_a_recomputed_window(shape: str, gemm: float, attention: float, scoring: float) -> None:
    cost = cost_model(shape)
    rates = replace(cost.device, event_overhead=0.0)
    cost = CostModel(cost.spec, rates)
    moves = cost.move(225 + 32)
    window = cost.events(kara_events(), Queries("recompute", 32)) - moves
    assert window == pytest.approx((gemm + attention + 2 * scoring) * 1e12 / 600e12, rel=0.01)
    logged = cost.events(kara_events(), Queries("log", 32)) - moves
    assert logged == pytest.approx(scoring * 1e12 / 300e12, rel=0.02)
    means = cost.events(kara_events(), Queries("log", 8)) - moves
    assert means == pytest.approx(logged / 4)
    eighth = cost.events(kara_events(8), Queries("recompute", 32, 1 / 8)) - 8 * moves
    assert eighth == pytest.approx(window)


def test_a_burst_stalls_for_half_a_second_and_costs_one_overhead() -> None:
    cost = cost_model()
    burst = cost.events(kara_events(30), Queries("recompute", 32))
    assert burst == pytest.approx(0.54, rel=0.05)
    assert cost.events([], Queries("recompute", 32)) == 0.0
    nothing = cost.events(kara_events(30), NO_QUERIES)
    assert nothing == cost.device.event_overhead + cost.move(30 * (225 + 32))
    assert cost.move(257) == pytest.approx(17e-6, rel=0.02)
    two = cost.events(kara_events(1, windows=2), Queries("log", 32)) - cost.device.event_overhead
    one = cost.events(kara_events(1), Queries("log", 32)) - cost.device.event_overhead
    assert two == pytest.approx(2 * one, rel=0.05)


def test_a_swap_takes_the_bus() -> None:
    """1,000 entries of Llama-8B are 125 MiB."""
    assert cost_model().swap(1000) == pytest.approx(125 * 2**20 / 50e9)


def test_queries_in_host_memory_take_the_bus() -> None:
    cost = cost_model()
    fetched = cost.observe(768, 768 * 736, 0, Queries("host", 32))
    assert fetched == pytest.approx(192 * 2**20 / 50e9)
    slow = replace(cost.device, host_bandwidth=1e15)
    scored = CostModel(cost.spec, slow).observe(768, 768 * 736, 0, Queries("host", 32))
    assert scored == cost.observe(768, 768 * 736, 0, Queries("log", 32)) < fetched
