"""``kv_trace`` and ``/v1/kv/events`` of a server with an engine process and the shipped model."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.real_server import Server
from tests.waiting import wait_until


@pytest.fixture
def server(real_server: Server) -> Server:
    return real_server


def test_what_was_dropped_is_what_usage_says(server: Server) -> None:
    answer = server.complete(max_tokens=300, ignore_eos=True, kv_trace=True).json()
    (choice,), details = answer["choices"], answer["usage"]["kv_cache_details"]
    start, *events = choice["kv_trace"]
    layers, heads = len(start["dropped"]), len(start["dropped"][0])
    assert (start["reason"], layers, heads) == ("start", 4, 2)
    assert len(events) == details["compactions"] > 2
    runs = [runs for event in events for row in event["dropped"] for runs in row]
    dropped = sum(sum(lane[1::2]) - sum(lane[::2]) for lane in runs)
    assert layers * heads * details["logical_tokens"] - dropped == details["held_entries"]
    assert sum(event["blocks_released"] for event in events) == details["blocks_released"]
    assert all(event["queries"] for event in events)


def test_more_than_is_followed_at_once_is_refused(server: Server) -> None:
    body: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "kv_trace": True, "n": 80}
    answer = server.complete(**body)
    assert answer.status_code == 429 and answer.json()["error"]["code"] == "too_many_traces"
    assert answer.headers["Retry-After"]
    wait_until(server.idle)


def test_the_stream_shows_the_request_that_runs(server: Server) -> None:
    enough = threading.Event()

    def ask() -> None:
        while not enough.is_set():
            server.complete(max_tokens=800, ignore_eos=True)

    asking = threading.Thread(target=ask)
    asking.start()
    seen: list[dict[str, Any]] = []
    with server.http.stream("GET", "/v1/kv/events") as response:
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
