"""What the machine has left. What a largest step takes is tried before the pool is sized; without a
GPU, that it is tried."""

from __future__ import annotations

import ast
import mmap
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve import LLM
from kvserve.engine.core import build
from kvserve.engine.device import pages
from kvserve.engine.runner import memory, rank
from kvserve.engine.runner.plan import EnginePlan
from tests.engine.models.decoding import make

GIB = 2**30


def make_llm(directory: Path, **settings: Any) -> LLM:
    sizes = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return make(directory, **sizes, **settings)


@pytest.mark.parametrize("layout", ["model", "layer", "head"])
def test_a_rehearsal_is_the_largest_step_and_leaves_nothing(
    llama_dir: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_llm(llama_dir, kv_layout=layout)
    runner, seen = llm.engine.core.runner, list[Any]()
    logits, draw = runner.model.logits, runner.batch.sampling.draw

    def watched_logits(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return logits(hidden)

    def watched_draw(of: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append((len(of), options))
        return draw(of, *args, **options)

    monkeypatch.setattr(runner.model, "logits", watched_logits)
    monkeypatch.setattr(runner.batch.sampling, "draw", watched_draw)
    runner.cache.kv[1:] = 7.0
    runner.rehearse(64)
    assert seen == [8, (8, {"filtered": True})]
    assert (runner.cache.kv[1:] == 7.0).all()
    assert not runner.batch.kv_lens.any() and not runner.batch.num_computed.any()


@pytest.mark.compiler
def test_the_pool_gets_what_is_left(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    measure, build_runner = rank.measure, rank.build_runner

    def remember(plan: EnginePlan, *args: Any) -> Any:
        given[:] = [plan, *args]
        return measure(plan, *args)

    monkeypatch.setattr(build, "measure", remember)
    llm = make_llm(llama_dir, policy={"name": "h2o", "budget": 16}, cudagraph_capture_sizes=(8,))
    plan, *args = given
    rehearsed = []

    def build_here(plan: EnginePlan, *args: Any) -> Any:
        return build_runner(replace(plan, device="cpu"), *args)

    monkeypatch.setattr(rank, "build_runner", build_here)

    def taken_by(run: Callable[[], None]) -> int:
        run()
        rehearsed.append(True)
        return 3 * GIB

    monkeypatch.setattr(rank, "taken_by", taken_by)
    freed: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    # What loading has left with torch is given back before what is free is read.
    monkeypatch.setattr(rank, "free_memory", lambda device, share: (9 + bool(freed)) * GIB)
    found = measure(replace(plan, device="cuda"), *args)
    scores = 4 * 8 * plan.layout.num_layers * plan.layout.num_kv_heads * plan.policy.kept_scores
    assert rehearsed and found.step == 3 * GIB and 0 < scores < 256 * 2**20
    # Those of requests' policies may be more than the server's own.
    assert found.events == 512 * 2**20 + 64 * 2**20 + 256 * 2**20
    assert found.left == 7 * GIB - found.events
    assert found.weights == sum(p.numel() * 4 for p in llm.engine.core.runner.model.parameters())
    pool = rank.smallest_pool(plan)
    tables = llm.engine.core.runner.batch
    assert pool.table_shapes == ((tables.block_tables.shape,), (tables.log_tables.shape,))
    spindlekv = {"name": "spindlekv", "flush_every": 4}
    tables = make_llm(llama_dir, policy=spindlekv).engine.core.runner.batch
    pool = rank.smallest_pool(given[0])
    (codes,) = tables.groups
    assert pool.table_shapes[2] == tuple(table.shape for table in codes.tables)


def test_memory_that_torch_gave_back_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([(10 * GIB, 0), (8 * GIB, 0)])
    for name, result in (
        *(("synchronize", None), ("empty_cache", None), ("reset_peak_memory_stats", None)),
        *(("max_memory_reserved", 5 * GIB), ("memory_reserved", 4 * GIB)),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda result=result: result)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: next(free))
    assert memory.taken_by(lambda: None) == 3 * GIB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_malloc_takes_the_settings() -> None:
    """In a process of its own."""
    code = """
import ctypes
from kvserve.engine.device import pages
taken, libc = [], ctypes.CDLL(None)
class Libc:
    @staticmethod
    def mallopt(name, value):
        taken.append((name, value, libc.mallopt(name, value)))
        return taken[-1][2]
pages.ctypes.CDLL = lambda name: Libc
pages.keep_freed_memory()
pages.share_one_arena()
print(taken)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *kept, trim, arenas = ast.literal_eval(done.stdout)
    assert kept[-1][0] == -3 and kept[-1][1] >= 2**25 and kept[-1][2] == 1
    assert trim == (-1, 2**28, 1) and arenas == (-8, 1, 1)


def test_memory_moves_to_large_pages_with_what_it_holds() -> None:
    """As far as the system has some: how many it gives, and when, is its own affair."""
    # A mapping of its own: what malloc gives may lie in large pages already.
    mapping = mmap.mmap(-1, 2**25, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    numbers = torch.frombuffer(mapping, dtype=torch.int64)
    torch.arange(2**22, out=numbers)
    pages.use_large_pages(numbers.data_ptr(), numbers.nbytes)
    assert torch.equal(numbers, torch.arange(2**22))
    pages.use_large_pages(numbers.data_ptr() + 1, 2**20)  # holds no whole page


def test_an_idle_engine_gives_back_what_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what malloc has kept."""
    held, trims = 300, 0

    def trim() -> None:
        nonlocal held, trims
        held, trims = held - 50, trims + 1

    monkeypatch.setattr(pages, "resident_bytes", lambda: held * 2**20)
    monkeypatch.setattr(pages, "trim_memory", trim)
    kept = pages.KeptMemory()
    seen = []
    for now in (360, 365, 370, 378, 250, 310, 320):
        held = now
        kept.give_back()
        seen.append(trims)
    assert seen == [0, 1, 1, 1, 1, 1, 2]  # 365 became 315; 320 is far above 250


# ---- threads -------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[int, list[int]]]]:
    """Four cores, of which torch would take all; yields what /proc/stat is to say."""
    samples: list[dict[int, list[int]]] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(memory, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(memory, "_quota", lambda: 4)
    monkeypatch.setattr(memory, "_core_times", lambda: samples.pop(0))
    monkeypatch.setattr(memory, "_SECONDS", 0.0)
    torch.set_num_threads(4)
    yield samples
    torch.set_num_threads(1)


@pytest.mark.parametrize(("idle", "expected"), [(4.0, 4), (2.6, 3), (1.2, 1), (0.1, 1)])
def test_idle_cores_count(machine: list[dict[int, list[int]]], idle: float, expected: int) -> None:
    ticks = int(idle * 25)
    machine += [{core: [50, 0, 0, 900, 7] for core in range(4)}]
    machine += [{core: [150 - ticks, 0, 0, 900 + ticks, 7] for core in range(4)}]
    assert memory.limit_threads() == (
        str(expected),
        f"{idle:.1f} of 4 cores were idle at start-up; OMP_NUM_THREADS",
    )
    assert torch.get_num_threads() == expected


def test_what_was_said_is_left_alone(
    machine: list[dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    assert memory.limit_threads() == ("1", "as torch was set; OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert memory.limit_threads() == ("1", "OMP_NUM_THREADS")


def test_this_machine_is_read() -> None:
    times = memory._core_times()
    assert not Path("/proc/stat").exists() or set(times) >= memory._cores()
    assert memory._quota() >= 1
