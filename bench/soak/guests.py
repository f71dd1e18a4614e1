"""Faults that need a server of their own: a full disk, a killed rank, a killed replica."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from bench.soak.served import FIXED, Served

SMALL = ("--model", "kvserve/tiny", "--max-num-seqs", "8", "--num-gpu-blocks-override", "400")
_FILE_SIZE = (
    "import resource, signal, sys;"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
    "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
    "sys.argv[0] = 'kvserve';"
    "from kvserve.server.cli.commands import main; main()"
)


def run_guests() -> list[dict[str, str]]:
    """Run each fault; returns its name and its result, which says FAILED if it went wrong."""
    guests: Sequence[tuple[str, Callable[[], str]]] = (
        ("disk full", disk_full),
        ("rank killed", rank_killed),
        ("replica killed", replica_killed),
    )
    found = []
    for name, guest in guests:
        try:
            result = guest()
        except Exception as error:
            result = f"FAILED: {type(error).__name__}: {error}"[:800]
        found.append({"fault": name, "result": result})
    return found


def disk_full() -> str:
    """No byte can be written to any file: the kernel cache is cold, the log is on a full disk."""
    with tempfile.TemporaryDirectory() as cache, open("/dev/full", "wb") as full:
        env = {**os.environ, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1"}
        port = str(_free_port())
        command = [sys.executable, "-c", _FILE_SIZE, *SMALL, "--port", port]
        process = subprocess.Popen(command, stderr=full, env=env)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(lambda: _healthy(url) or process.poll() is not None, 300)
            answer = httpx.post(f"{url}/v1/completions", json=FIXED, timeout=60)
            assert answer.status_code == 200, answer.text
            process.terminate()
            status = process.wait(60)
            assert status == 0, f"exit status {status}"
        finally:
            process.kill()
            process.wait()
    return "served, and ended with status 0"


def rank_killed() -> str:
    """One of two ranks dies during streams: all get an error, the server ends with status 1."""
    served = Served((*SMALL, "--tensor-parallel-size", "2"))
    served.start()
    errors: list[str] = []

    def stream() -> None:
        body = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer,
        ):
            errors.extend(line for line in answer.iter_lines() if '"engine_dead"' in line)

    threads = [threading.Thread(target=stream) for _ in range(4)]
    for thread in threads:
        thread.start()
    _wait(lambda: served.stats()["tokens_logical"] > 0, 60)
    engine = served.engine
    ranks = Path(f"/proc/{engine}/task/{engine}/children").read_text().split()
    os.kill(int(ranks[0]), signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    status = served.process.wait(60)
    assert status == 1, f"exit status {status}"
    assert len(errors) == 4, f"{len(errors)} of 4 streams were told"
    return "4 of 4 streams ended with engine_dead, the server with status 1"


def replica_killed() -> str:
    """One of two replicas dies: the other answers, and Serve starts a new one."""
    if importlib.util.find_spec("ray") is None:
        return "not run: ray is not installed"
    served = Served((*SMALL, "--data-parallel-size", "2"))
    served.start()
    try:
        served.fixed_tokens()
        engines = _engines_below(served.process.pid)
        assert engines, "no engine process found"
        os.kill(engines[0], signal.SIGKILL)
        time.sleep(1.0)
        statuses = [
            httpx.post(f"{served.url}/v1/completions", json=FIXED, timeout=120).status_code
            for _ in range(20)
        ]
        assert statuses[-1] == 200, statuses
        assert set(statuses) <= {200, 503}, statuses
    finally:
        served.stop()
    return f"{statuses.count(200)} of 20 requests right after it were answered, the others a 503"


def _engines_below(pid: int) -> list[int]:
    """Engine processes among the descendants of a process."""
    parents: dict[int, int] = {}
    commands: dict[int, bytes] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                status = (folder / "stat").read_text().rpartition(")")[2].split()
                parents[int(folder.name)] = int(status[1])
                commands[int(folder.name)] = (folder / "cmdline").read_bytes()
    below, found = {pid}, []
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
        found += [child for child in more if b"core_process" in commands.get(child, b"")]
    return found


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _wait(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s")
        time.sleep(0.2)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
