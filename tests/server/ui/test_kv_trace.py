"""``kv_trace`` in requests and answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.conftest import RunningServer, StartServer
from tests.server.test_refusals import check


@pytest.fixture
def traced(start_server: StartServer) -> RunningServer:
    return start_server(allow_kv_trace=True)


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


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
    streamed = chunks(ask(kv_trace=True, max_tokens=20, stream=True))
    told = events([choice for chunk in streamed for choice in chunk["choices"]])
    assert [{**event, "time": 0} for event in told] == [{**event, "time": 0} for event in whole]


def test_choices_are_traced_apart(traced: RunningServer) -> None:
    choices = traced.complete(kv_trace=True, n=2, max_tokens=10).json()["choices"]
    assert [len(choice["kv_trace"]) for choice in choices] == [2, 2]
    streamed = chunks(traced.complete(kv_trace=True, n=2, max_tokens=10, stream=True))
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
    body: dict[str, Any] = {"input": "hi", "kv_trace": True}
    check(traced.post("/v1/responses", **body), 400, "kv_trace", "unsupported_field")
    assert server.http.get("/server_info").json()["kv_trace"] is False
    assert traced.http.get("/server_info").json()["kv_trace"] is True
