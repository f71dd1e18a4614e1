"""A client that leaves frees its blocks, streamed or not; other requests do not notice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.server.conftest import RunningServer, StartServer, sent
from tests.server.fake_engine import FakeEngine
from tests.waiting import wait_until


def idle(server: RunningServer) -> bool:
    stats = server.http.get("/v1/kv/stats").json()
    back = stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
    return back and not stats["requests"]


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("stream", [True, False])
def test_nothing_of_who_left_waits_for_a_collection(server: RunningServer, stream: bool) -> None:
    """A hundred streams with log-probabilities left 80 MiB that referred to itself."""
    body = {"prompt": "HALF", "max_tokens": 400, "stream": stream, "logprobs": 5}
    with sent(server.url, body):
        wait_until(lambda: any(each.num_logprobs for each in server.state.generations))
        left = [weakref.ref(each) for each in server.state.generations]
    wait_until(lambda: idle(server) and not any(each() for each in left))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [["STUCK"], ["STUCK", "HALF", "a"]])
def test_leaving_before_the_answer(server: RunningServer, prompts: list[str], stream: bool) -> None:
    ended = prompts.count("a")
    with sent(server.url, {"prompt": prompts, "max_tokens": 3, "stream": stream}):
        wait_until(lambda: len(server.engine.seen) == len(prompts))
        wait_until(lambda: len(server.engine.stats.requests) == len(prompts) - ended)
    wait_until(lambda: idle(server) and len(server.engine.aborted) == len(prompts) - ended)


def test_a_client_that_stops_reading(start_server: StartServer) -> None:
    """The server is stuck in a write when the client goes."""
    server = start_server(FakeEngine(max_model_len=100_000))
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "a", "max_tokens": 90_000, "stream": True, "stream_options": options}
    with sent(server.url, body) as client:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        wait_until(lambda: not idle(server))
    wait_until(lambda: idle(server) and not server.state.generations)


def test_others_go_on(server: RunningServer) -> None:
    with ThreadPoolExecutor(4) as others:
        asked = [others.submit(server.complete, "SLOW", max_tokens=20) for _ in range(4)]
        with sent(server.url, {"prompt": "STUCK"}):
            wait_until(lambda: len(server.engine.seen) == 5)
    texts = [each.result().json()["choices"][0]["text"] for each in asked]
    assert texts == ["".join(f"{i} " for i in range(20))] * 4
    wait_until(lambda: len(server.engine.aborted) == 1)


def test_one_id_twice_at_the_same_time(server: RunningServer) -> None:
    ask = partial(server.complete, "SLOW", max_tokens=5, request_id="same")
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(ask) for _ in range(3)]
    assert [each.result().status_code for each in asked] == [200, 200, 200]
    assert len({request_id for _, _, request_id in server.engine.seen}) == 3
