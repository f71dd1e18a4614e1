"""Two replicas of the shipped model on Ray Serve: streams, aborts, a replica that dies, the end."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import openai
import pytest

from kvserve import EngineConfig, RequestOutput, SamplingParams
from tests.server.real_server import MODEL, Server, start
from tests.waiting import WAIT, wait_until

HAS_RAY = importlib.util.find_spec("ray") is not None
REPLICA = "ray::ServeReplica:kvserve:engine"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server("--data-parallel-size", "2", "--policy", "kara", "--policy.window", "64")
    yield server
    server.stop()


def descendants(pid: int) -> dict[int, str]:
    """Command lines of all processes below ``pid``, by their ids."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = {}, [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found.update({child: command(child) for child in new})
    return found


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def replicas(server: Server) -> list[int]:
    below = descendants(server.process.pid)
    return [pid for pid, line in below.items() if line.startswith(REPLICA)]


def engines(server: Server) -> set[str]:
    """Engines that report."""
    lines = server.http.get("/metrics").text.splitlines()
    wanted = (line for line in lines if line.startswith("kvserve:num_requests_running{"))
    return {line.partition('engine="')[2].partition('"')[0] for line in wanted}


def requests_by_engine(server: Server) -> dict[str, float]:
    counts: dict[str, float] = {}
    for line in server.http.get("/metrics").text.splitlines():
        if line.startswith("kvserve:request_success_total{") and 'reason="length"' in line:
            engine = line.partition('engine="')[2].partition('"')[0]
            counts[engine] = counts.get(engine, 0) + float(line.split()[-1])
    return counts


class Stream(Thread):
    """A long completion; ``error`` is what its client was told."""

    def __init__(self, server: Server, max_tokens: int = 3000) -> None:
        super().__init__(daemon=True)
        self.chunks = 0
        self.error: Exception | None = None
        self._create = server.openai.completions.create
        self._max_tokens = max_tokens
        self.start()

    def run(self) -> None:
        try:
            for _ in self._create(
                model=MODEL,
                prompt="Hello",
                max_tokens=self._max_tokens,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                self.chunks += 1
        except openai.APIError as error:
            self.error = error


@pytest.mark.skipif(not HAS_RAY, reason="needs Ray")
async def test_a_reset_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Without replicas: only what the server does with Ray's answers."""
    from kvserve.server.replicas.replicated_engine import ReplicatedEngine

    class Handle:
        def broadcast(self, method: str) -> Any:
            raise RuntimeError("no replica is there")

        def options(self, stream: bool) -> Any:
            return SimpleNamespace(generate=SimpleNamespace(remote=Pieces))

    class Pieces:
        def __init__(self, ticket: Any) -> None:
            self._pieces = [RequestOutput(ticket.request_id, None, [], [], finished=True)]

        async def __aiter__(self) -> AsyncIterator[RequestOutput]:
            for piece in self._pieces:
                yield piece

        def cancel(self) -> None: ...

    engine = ReplicatedEngine(EngineConfig.from_flat(model=MODEL))
    engine._handle = Handle()
    engine.reset_prefix_cache()
    for name in "ab":
        outputs = [out async for out in engine.generate([5], SamplingParams(), name)]
        assert outputs[-1].finished
    assert "not reset: RuntimeError: no replica is there" in caplog.text


@pytest.mark.ray
@pytest.mark.skipif(not HAS_RAY or sys.platform != "linux", reason="needs Ray, and Linux's /proc")
class TestReplicas:
    def test_the_openai_client_streams(self, server: Server) -> None:
        whole = server.openai.completions.create(
            model=MODEL, prompt="Hello", max_tokens=200, temperature=0
        )
        streamed = server.openai.completions.create(
            model=MODEL,
            prompt="Hello",
            max_tokens=200,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(streamed)
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].text
        assert chunks[-1].usage == whole.usage

    def test_both_replicas_take_requests_and_report(self, server: Server) -> None:
        streams = [Stream(server, 100) for _ in range(4)]
        for stream in streams:
            stream.join(WAIT)
            assert stream.error is None
        assert engines(server) == {"0", "1"}
        assert min(requests_by_engine(server).values()) >= 1

    def test_a_refused_request_says_why(self, server: Server) -> None:
        answer = server.complete([10**6], max_tokens=2)
        assert answer.status_code == 400
        assert "ray" not in answer.text.lower()
        assert len(answer.json()["error"]["message"]) < 200

    def test_a_client_that_leaves_frees_its_blocks(self, server: Server) -> None:
        body = {"prompt": "Hello", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            chunks = answer.iter_bytes()  # closes the stream when nobody names it
            next(chunks)
            wait_until(lambda: server.stats()["num_running"] == 1)
        wait_until(server.idle)

    def test_a_dead_replica_fails_its_own_requests_and_comes_back(self, server: Server) -> None:
        streams = [Stream(server), Stream(server)]
        wait_until(lambda: all(stream.chunks for stream in streams))
        victim, _ = replicas(server)
        orphans = descendants(victim)
        assert orphans
        os.kill(victim, signal.SIGKILL)
        for stream in streams:
            stream.join(WAIT)
        (error,) = [stream.error for stream in streams if stream.error is not None]
        assert "the replica that had this request stopped" in str(error)
        assert server.complete(max_tokens=2).status_code == 200
        wait_until(lambda: not orphans.keys() & descendants(1).keys())
        wait_until(lambda: len(replicas(server)) == 2 and engines(server) == {"0", "1"})
        after = [Stream(server, 50) for _ in range(4)]
        for stream in after:
            stream.join(WAIT)
            assert stream.error is None
        wait_until(server.idle)

    def test_it_ends_with_all_its_processes(self, server: Server) -> None:
        below = descendants(server.process.pid)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT) == 0
        wait_until(lambda: not below.keys() & descendants(1).keys())


@pytest.mark.skipif(HAS_RAY, reason="Ray is installed")
def test_without_ray_the_extra_is_named() -> None:
    process = start("--model", MODEL, "--data-parallel-size", "2", "--port", "0")
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == 1
    assert "-m pip install -e '" in told and "[ray]'" in told and "Traceback" not in told


def test_autoscaling_needs_replicas() -> None:
    argv = ["--autoscaling-config", '{"max_replicas": 4}']
    process = start("--model", MODEL, *argv)
    _, told = process.communicate(timeout=WAIT)
    assert process.returncode == 2
    assert "--autoscaling-config needs --data-parallel-size 2 or more" in told
