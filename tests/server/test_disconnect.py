"""A client that leaves frees its blocks, streamed or not; other requests do not notice."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import httpx
import pytest

from tests.server.conftest import MODEL, RunningServer, StartServer, sent
from tests.server.fake_engine import FakeEngine
from tests.waiting import WAIT, wait_until


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


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_leaving_a_stream(server: RunningServer, path: str) -> None:
    body = {
        "model": MODEL,
        "stream": True,
        "max_tokens": 400,
        **(
            {"prompt": "HALF"}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "HALF"}]}
        ),
    }
    with server.http.stream("POST", path, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert not idle(server)
    wait_until(lambda: idle(server) and len(server.engine.aborted) == 1)


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
    answers: list[str] = []
    others = [
        threading.Thread(
            target=lambda: answers.append(
                httpx.post(
                    f"{server.url}/v1/completions",
                    json={"prompt": "SLOW", "max_tokens": 20},
                    timeout=WAIT,
                ).json()["choices"][0]["text"]
            )
        )
        for _ in range(4)
    ]
    for thread in others:
        thread.start()
    with sent(server.url, {"prompt": "STUCK"}):
        wait_until(lambda: len(server.engine.seen) == 5)
    for thread in others:
        thread.join()
    assert answers == ["".join(f"{i} " for i in range(20))] * 4
    wait_until(lambda: len(server.engine.aborted) == 1)


def test_one_id_twice_at_the_same_time(server: RunningServer) -> None:
    headers = {"X-Request-Id": "same"}
    body = {"prompt": "SLOW", "max_tokens": 5}
    answers: list[int] = []

    def ask() -> None:
        url = f"{server.url}/v1/completions"
        answers.append(httpx.post(url, json=body, headers=headers, timeout=WAIT).status_code)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200, 200, 200]
    assert len({request_id for _, _, request_id in server.engine.seen}) == 3
