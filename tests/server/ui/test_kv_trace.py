"""``kv_trace`` in requests and answers; it and ``/v1/kv/events`` of a server with a real engine."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import RunningServer, StartServer, payloads
from tests.server.real_server import Server
from tests.server.test_refusals import check
from tests.waiting import wait_until


@pytest.fixture
def traced(start_server: StartServer) -> RunningServer:
    return start_server(allow_kv_trace=True)


def events(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for part in parts for event in part.get("kv_trace", [])]


@pytest.mark.parametrize("path", ["complete", "chat"])
def test_a_stream_and_a_whole_answer_trace_alike(traced: RunningServer, path: str) -> None:
    ask = getattr(traced, path)
    (choice,) = ask(kv_trace=True, max_tokens=20).json()["choices"]
    whole = choice["kv_trace"]
    assert [event["reason"] for event in whole] == ["start", "due", "due"]
    assert whole[0]["dropped"] == [[[]], [[]]]
    assert whole[1]["dropped"] == [[[whole[1]["seen"] - 4, whole[1]["seen"] - 2]], [[]]]
    assert (whole[1]["blocks_released"], whole[1]["queries"]) == (1, 8)
    streamed = payloads(ask(kv_trace=True, max_tokens=20, stream=True))
    told = events([choice for chunk in streamed for choice in chunk["choices"]])
    assert [{**event, "time": 0} for event in told] == [{**event, "time": 0} for event in whole]


def test_choices_are_traced_apart(traced: RunningServer) -> None:
    choices = traced.complete(kv_trace=True, n=2, max_tokens=10).json()["choices"]
    assert [len(choice["kv_trace"]) for choice in choices] == [2, 2]
    streamed = payloads(traced.complete(kv_trace=True, n=2, max_tokens=10, stream=True))
    for index in range(2):
        parts = [c for chunk in streamed for c in chunk["choices"] if c["index"] == index]
        assert [event["reason"] for event in events(parts)] == ["start", "due"]


def test_it_is_only_there_for_who_asks_and_may(
    server: RunningServer, traced: RunningServer
) -> None:
    for asked in ({}, {"kv_trace": False}, {"kv_trace": None}):
        assert "kv_trace" not in server.complete(**asked).json()["choices"][0]
    assert "kv_trace" not in traced.chat().json()["choices"][0]
    message = check(server.complete(kv_trace=True), 400, "kv_trace", "kv_trace_not_allowed")
    assert "--allow-kv-trace" in message
    assert server.http.get("/server_info").json()["kv_trace"] is False
    assert traced.http.get("/server_info").json()["kv_trace"] is True


def test_more_than_is_followed_at_once_is_refused(real_server: Server) -> None:
    body: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "kv_trace": True, "n": 80}
    answer = real_server.complete(**body)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_traces"
    assert answer.headers["Retry-After"]
    wait_until(real_server.idle)


def test_the_stream_shows_the_request_that_runs(real_server: Server) -> None:
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            real_server.complete(max_tokens=800, ignore_eos=True)

    asking = threading.Thread(target=ask)
    asking.start()
    seen: list[dict[str, Any]] = []
    with real_server.http.stream("GET", "/v1/kv/events") as response:
        lines = response.iter_lines()
        while not any(each["compactions"] for event in seen for each in event["requests"]):
            line = next(lines)
            if line.startswith("data: "):
                seen.append(json.loads(line.removeprefix("data: ")))
        enough.set()
    asking.join()
    assert seen[0]["cells"], "the first event came before there was a view"
    for event in seen:
        if not event["requests"]:  # between two of them
            continue
        runs = event["cells"]["runs"]
        counts = dict.fromkeys(range(5), 0)
        for owner, count in zip(runs[::2], runs[1::2], strict=True):
            counts[owner] += count
        (request,) = event["requests"]
        assert sum(counts.values()) == event["blocks_total"] == 3000
        assert counts[0] == event["blocks_free"] and counts[1] == event["blocks_cached"]
        assert counts[4] + counts[2] == request["blocks"] and counts[2] == request["log_blocks"]
