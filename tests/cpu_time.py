"""A plugin (``-p tests.cpu_time``): how much CPU each test takes, its processes included.

CPU and not seconds of the clock, so that a busy machine changes little. A module's fixtures count
for the first test that asks for them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from pathlib import Path

import pytest

SHOWN = 20  # tests in the table at the end


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("cpu time")
    group.addoption("--cpu-limit", type=float, help="fail a test that takes more seconds of CPU")
    group.addoption("--cpu-file", type=Path, help="write each test's seconds of CPU as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime(config), "cpu-time-of-tests")


def cpu_seconds() -> float:
    """CPU time of this process, of those that it has waited for, and of those that still run."""
    # `os.times` counts in hundredths of a second; of most tests that would leave nothing.
    ended = os.times()
    own = time.process_time() + ended.children_user + ended.children_system
    return own + sum(_ticks(pid) for pid in _descendants(os.getpid())) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    found = []
    # Not on every system: without it, processes count once they have ended.
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in listed.read_text().split()]
        except OSError:  # the thread has just ended
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _ticks(pid: int) -> int:
    """utime, stime, cutime and cstime of proc(5)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return sum(int(field) for field in stat.rpartition(")")[2].split()[11:15])


class CpuTime:
    """Measures where tests run, and prints where they are reported."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.limit: float | None = config.getoption("--cpu-limit")
        self.begun = 0.0
        self.seconds: dict[str, float] = {}  # by test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self.begun = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            taken = max(0.0, cpu_seconds() - self.begun)
            report.user_properties.append(("cpu_seconds", round(taken, 4)))
            if self.limit is not None and taken > self.limit and report.passed:
                report.outcome = "failed"
                report.longrepr = f"took {taken:.1f} s of CPU, of at most {self.limit:g}"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == "cpu_seconds" and isinstance(value, float):
                self.seconds[report.nodeid] = value

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        slowest = sorted(self.seconds.items(), key=lambda test: -test[1])
        total = sum(self.seconds.values())
        terminalreporter.section(f"{len(slowest)} tests took {total:.0f} s of CPU; the slowest")
        for test, seconds in slowest[:SHOWN]:
            terminalreporter.write_line(f"{seconds:7.2f} s  {test}")
        if path := self.config.getoption("--cpu-file"):
            path.write_text(json.dumps(dict(slowest), indent=0) + "\n")
