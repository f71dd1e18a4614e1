"""How many threads an engine takes depends on what the machine has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvserve.engine.core import threads


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, list[int]]]:
    """Four cores, of which torch would take all; returns what /proc/stat is to say."""
    samples: list[dict[int, list[int]]] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "_cores", lambda: {0, 1, 2, 3})
    monkeypatch.setattr(threads, "_quota", lambda: 4)
    monkeypatch.setattr(threads, "_core_times", lambda: samples.pop(0))
    monkeypatch.setattr(threads, "_SECONDS", 0.0)
    torch.set_num_threads(4)
    return samples


@pytest.fixture(autouse=True)
def one_thread_again() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize(("idle", "expected"), [(4.0, 4), (2.6, 3), (1.2, 1), (0.1, 1)])
def test_idle_cores_count(machine: list[dict[int, list[int]]], idle: float, expected: int) -> None:
    ticks = int(idle * 25)
    machine += [{core: [50, 0, 0, 900, 7] for core in range(4)}]
    machine += [{core: [150 - ticks, 0, 0, 900 + ticks, 7] for core in range(4)}]
    assert threads.limit_threads() == (
        str(expected),
        f"{idle:.1f} of 4 cores were idle at start-up; OMP_NUM_THREADS",
    )
    assert torch.get_num_threads() == expected


def test_what_the_environment_says_is_left_alone(
    machine: list[dict[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads.limit_threads() == ("4", "OMP_NUM_THREADS")


def test_one_thread_stays_one(machine: list[dict[int, list[int]]]) -> None:
    torch.set_num_threads(1)
    assert threads.limit_threads() == ("1", "as torch was set; OMP_NUM_THREADS")


def test_this_machine_is_read() -> None:
    times = threads._core_times()
    assert not Path("/proc/stat").exists() or set(times) >= threads._cores()
    assert threads._quota() >= 1
