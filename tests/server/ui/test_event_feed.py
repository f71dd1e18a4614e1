"""``/v1/kv/events``: what it says, how often, and what readers that never read cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvserve.server.ui import event_feed
from kvserve.stats import EngineStats, PoolView, RequestStats
from tests.server.conftest import RunningServer, StartServer
from tests.server.fake_engine import FakeEngine
from tests.waiting import wait_until

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


class Clock:
    """Stands for ``asyncio`` and ``time`` in the feed: time passes when the test says so."""

    create_task = staticmethod(asyncio.create_task)

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            await asyncio.sleep(0)

    async def passes(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(4):  # everybody who has slept enough looks
            await asyncio.sleep(0)


async def test_at_most_five_events_a_second_and_none_without_news(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, engine, told = Clock(), FakeEngine(), list[bytes]()
    monkeypatch.setattr(event_feed, "asyncio", clock)
    monkeypatch.setattr(event_feed, "time", clock)
    settings = SimpleNamespace(ping_interval=15.0)
    state: Any = SimpleNamespace(engine=engine, ready=True, draining=False, settings=settings)
    monkeypatch.setattr(event_feed, "encode_event", lambda *_: b"event %d" % len(told))
    feed = event_feed.EventFeed(state)
    feed.enter("a")
    feed.enter("a")
    assert engine.watched == [True], "two read, and the engine is told once"

    async def read() -> None:
        async for event in feed.events():
            told.append(event)

    reading = asyncio.create_task(read())
    await clock.passes(1.0)  # the first view of the pool may take as long
    for step in range(100):
        engine.stats = replace(STATS, steps_total=step)
        await clock.passes(0.02)
    assert 8 <= len(told) <= 11, "in two seconds with news all the time"
    for _ in range(50):
        await clock.passes(0.2)
    quiet = len(told)
    assert quiet <= 12, "the last news, once"
    for _ in range(50):
        await clock.passes(0.2)
    assert told[quiet:] == [b": ping\n\n"]
    feed.leave("a")
    assert engine.watched == [True], "somebody still reads"
    feed.leave("a")
    assert engine.watched == [True, False]
    state.draining = True
    await clock.passes(1.0)
    assert reading.done()


def test_it_ends_with_the_server_and_needs_one_that_is_ready(start_server: StartServer) -> None:
    loading = start_server(ready=False)
    assert loading.http.get("/v1/kv/events").status_code == 503
    server = start_server()
    with server.http.stream("GET", "/v1/kv/events") as response:
        lines = response.iter_lines()
        assert any(line.startswith("data: ") for line in lines)
        server.state.draining = True
        assert not [line for line in lines if line.startswith("data: ")]


def test_nothing_is_queued_for_readers_that_never_read(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event has 100 KB. A reader costs the one that it does not take, however many follow, and
    each is encoded once for all."""
    server, encoded, readers = start_server(), list[bytes](), 50
    encode = event_feed.encode_event

    def count(stats: EngineStats, pool: PoolView | None) -> bytes:
        encoded.append(encode(stats, pool))
        return encoded[-1]

    def unsent() -> list[int]:
        transports = [each.transport for each in server.uvicorn.server_state.connections]
        sizes: list[int] = server.call(lambda: [t.get_write_buffer_size() for t in transports])
        return [size for size in sizes if size]

    monkeypatch.setattr(event_feed, "encode_event", count)
    monkeypatch.setattr(event_feed, "INTERVAL_S", 0.002)
    server.engine.pool = replace(VIEW, cells=[0, 1, 1, 1] * 8000)
    address = urlsplit(server.url)
    with contextlib.ExitStack() as open_now:
        for _ in range(readers):
            reader = open_now.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect((address.hostname, address.port))
            reader.sendall(b"GET /v1/kv/events HTTP/1.1\r\nHost: a\r\n\r\n")
        views = 0

        def show_another() -> None:
            nonlocal views
            views += 1
            server.engine.pool = replace(VIEW, cells=[0, 1, 1, 1] * 8000, time=float(views))
            wait_until(lambda: len(encoded) >= views)

        def all_are_behind() -> bool:
            show_another()
            return len(unsent()) == readers

        wait_until(all_are_behind)  # what the system's own buffers take is soon full
        for _ in range(20):
            show_another()
            assert server.complete("a", max_tokens=4).status_code == 200
        assert max(unsent()) < 2.5 * len(encoded[0])
        assert len(encoded) <= views + 1
    wait_until(lambda: server.engine.watched[-1] is False)


def test_a_client_has_a_number_of_readers(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wakes the event loop five times a second."""
    monkeypatch.setattr(event_feed, "MOST_READERS", 2)
    server = start_server()
    server.engine.pool = VIEW
    with server.http.stream("GET", "/v1/kv/events"), server.http.stream("GET", "/v1/kv/events"):
        refused = server.http.get("/v1/kv/events")
        assert refused.status_code == 429 and "2 times at once" in refused.text
    wait_until(lambda: server.engine.watched[-1] is False)
    with server.http.stream("GET", "/v1/kv/events") as answer:
        assert answer.status_code == 200
