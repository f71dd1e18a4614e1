"""A server of two tensor-parallel ranks: it answers, and its processes end together."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.server.real_server import Server
from tests.waiting import WAIT, alive, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

KARA = ("--policy", "kara", "--policy.window", "32", "--policy.buffer", "8")


def child(pid: int, of: str) -> int:
    """The child of ``pid`` whose command line holds ``of``."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (found,) = (int(p) for p in pids if of in Path(f"/proc/{p}/cmdline").read_text())
    return found


class Ranks:
    """A running server with the ids of its engine's process and of the second rank's."""

    def __init__(self) -> None:
        self.server = Server(*KARA, "--tensor-parallel-size", "2")
        self.engine = child(self.server.process.pid, "core_process")
        self.rank = child(self.engine, "kvserve.engine.runner.rank_process")

    def gone(self) -> bool:
        return not alive(self.rank) and not alive(self.engine)

    def stream(self, max_tokens: int = 2000) -> Callable[[], str]:
        """Start a long answer; the result waits for its end."""
        answers: list[httpx.Response] = []
        body = {"prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        url = f"{self.server.url}/v1/completions"
        thread = threading.Thread(
            target=lambda: answers.append(httpx.post(url, json=body, timeout=WAIT))
        )
        thread.start()
        wait_until(lambda: bool(self.server.stats()["requests"]))

        def end() -> str:
            thread.join(WAIT)
            return answers[0].text

        return end


def test_a_dead_rank_is_503_and_an_error_to_open_requests() -> None:
    ranks = Ranks()
    try:
        assert "2 ranks, 4 query and 1 KV heads each" in ranks.server.text
        usage = ranks.server.complete(max_tokens=60, ignore_eos=True).json()["usage"]
        assert usage["kv_cache_details"]["compactions"] > 0
        end = ranks.stream()
        os.kill(ranks.rank, signal.SIGKILL)
        assert "rank 1 ended (exit code -9)" in end()
        assert ranks.server.http.get("/health").status_code == 503
        assert ranks.server.process.wait(WAIT) == 1
        wait_until(ranks.gone)
    finally:
        ranks.server.stop()


TO_ALL = {"SIGTERM": signal.SIGTERM, "terminal": signal.SIGHUP, "Ctrl-C": signal.SIGINT}
"""As an init system, a terminal that is closed (often twice) and a shell send them."""


@pytest.mark.parametrize("case", [*TO_ALL, "first rank", "idle rank", "server"])
def test_no_process_is_left(case: str) -> None:
    ranks = Ranks()
    process = ranks.server.process
    try:
        if case in TO_ALL:
            end = ranks.stream(200)
            for pid in (ranks.rank, ranks.engine, *[process.pid] * (1 + (case == "terminal"))):
                os.kill(pid, TO_ALL[case])
            assert end().endswith("data: [DONE]\n\n")
            assert process.wait(WAIT) == 0
        elif case == "first rank":
            end = ranks.stream()
            os.kill(ranks.engine, signal.SIGKILL)
            assert "the engine process ended" in end()
        elif case == "idle rank":
            os.kill(ranks.rank, signal.SIGKILL)
            wait_until(lambda: ranks.server.http.get("/health").status_code == 503)
        else:
            process.kill()
        wait_until(ranks.gone)
    finally:
        ranks.server.stop()
