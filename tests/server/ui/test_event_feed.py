"""``/v1/kv/events``: what it says, how often, and what readers that never read cost."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from kvserve.outputs import EngineStats, PoolView, RequestStats
from tests.server.conftest import RunningServer, StartServer, wait_until

STATS = EngineStats(
    num_running=1,
    blocks_total=10,
    blocks_free=3,
    blocks_cached=2,
    generation_tokens_total=7,
    requests=(RequestStats("cmpl-a-0-1234", "kara", 90, 40, 4, 2, 4096),),
)
VIEW = PoolView(12.5, STATS, 1, [0, 3, 1, 2, 4, 4, 2, 1], [1])


def read(server: RunningServer, count: int) -> Iterator[dict[str, Any]]:
    with server.http.stream("GET", "/v1/kv/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))
                count -= 1
                if not count:
                    return


def reading(server: RunningServer) -> bool:
    return server.engine.watched[-1:] == [True]


def test_an_event_has_the_pool_and_who_runs(start_server: StartServer) -> None:
    server = start_server()
    server.engine.pool = VIEW
    (event,) = read(server, 1)
    assert event["cells"] == {"blocks_per_cell": 1, "runs": [0, 3, 1, 2, 4, 4, 2, 1]}
    assert (event["time"], event["generation_tokens_total"]) == (12.5, 7)
    assert (event["blocks_total"], event["blocks_free"], event["blocks_cached"]) == (10, 3, 2)
    (request,) = event["requests"]
    assert request["request_id"] == "cmpl-a-0-1234" and request["log_blocks"] == 1
    assert (request["logical_tokens"], request["held_tokens"]) == (90, 40)


def test_replicas_have_no_cells(start_server: StartServer) -> None:
    server = start_server()
    server.engine.stats = STATS
    (event,) = read(server, 1)
    assert event["cells"] is None and event["requests"][0]["blocks"] == 4


def test_the_engine_is_watched_only_while_somebody_reads(start_server: StartServer) -> None:
    server = start_server()
    server.complete("a", max_tokens=4)
    assert server.engine.watched == []
    with server.http.stream("GET", "/v1/kv/events") as first:
        lines = first.iter_lines()
        next(lines)
        with server.http.stream("GET", "/v1/kv/events") as second:
            others = second.iter_lines()
            next(others)
            assert server.engine.watched == [True]
        time.sleep(0.5)
        assert server.engine.watched == [True], "somebody still reads"
    wait_until(lambda: server.engine.watched == [True, False])


def test_at_most_five_events_a_second_and_none_without_news(start_server: StartServer) -> None:
    server = start_server()
    times: list[float] = []
    stream = server.http.stream("GET", "/v1/kv/events", timeout=3)
    with stream as response, pytest.raises(httpx.ReadTimeout):
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            times.append(time.monotonic())
            if len(times) < 6:
                server.engine.stats = replace(STATS, steps_total=len(times))
    assert len(times) == 6
    assert times[-1] - times[0] > 0.8, "five more, a fifth of a second apart"


def test_it_ends_with_the_server_and_needs_one_that_is_ready(start_server: StartServer) -> None:
    loading = start_server(ready=False)
    assert loading.http.get("/v1/kv/events").status_code == 503
    server = start_server()
    with server.http.stream("GET", "/v1/kv/events") as response:
        lines = response.iter_lines()
        assert any(line.startswith("data: ") for line in lines)
        server.state.draining = True
        assert not [line for line in lines if line.startswith("data: ")]


def resident() -> int:
    """Bytes of memory that this process holds, the server in its thread among them."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_readers_that_never_read_cost_little(start_server: StartServer) -> None:
    server = start_server()
    wide = [0, 1, 1, 1] * 8000
    server.engine.pool = replace(VIEW, cells=wide)
    address = urlsplit(server.url)
    sockets = []
    before = resident()
    try:
        for _ in range(100):
            reader = socket.create_connection((address.hostname, address.port or 80))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.sendall(b"GET /v1/kv/events HTTP/1.1\r\nHost: a\r\n\r\n")
            sockets.append(reader)
        wait_until(lambda: reading(server))
        wait_until(lambda: server.http.get("/v1/kv/events").status_code == 429)
        deadline, number = time.monotonic() + 4, 0
        slowest = 0.0
        while time.monotonic() < deadline:
            number += 1
            server.engine.pool = replace(VIEW, cells=wide, time=float(number))
            started = time.monotonic()
            assert server.complete("a", max_tokens=4).status_code == 200
            slowest = max(slowest, time.monotonic() - started)
        # An event has 100 KB: twenty of them for each reader would be 400 MB.
        assert resident() - before < 150e6
        assert slowest < 2.0  # seconds; beside other tests it has been 1.2
    finally:
        for reader in sockets:
            reader.close()
    wait_until(lambda: server.engine.watched[-1] is False, 10)
