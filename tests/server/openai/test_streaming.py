"""Server-sent events, byte by byte and through the official client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from kvserve.outputs import CompletionOutput, Logprob, RequestOutput
from kvserve.server.openai.logprobs import Echo
from kvserve.server.openai.protocol import CompletionRequest
from kvserve.server.openai.streaming import CompletionWriter
from tests.server.conftest import MODEL, RunningServer, StartServer
from tests.server.fake_engine import FakeEngine, FakeTokenizer

USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def events(text: str) -> list[Any]:
    """The payloads of a stream, whose framing is checked on the way."""
    assert text.endswith("\n\n")
    frames = text[:-2].split("\n\n")
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames[-1] == "data: [DONE]"
    return [json.loads(frame[len("data: ") :]) for frame in frames[:-1]]


def test_chat_stream_contract(server: RunningServer) -> None:
    response = server.chat("a", max_tokens=3, **USAGE)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    chunks = events(response.text)
    *parts, last = chunks
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "0 1 2 "
    assert deltas[-1] == {}
    reasons = [part["choices"][0]["finish_reason"] for part in parts]
    assert reasons == [None] * (len(parts) - 1) + ["length"]
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["usage"]["kv_cache_details"]["logical_tokens"] > 3


def test_completion_stream_contract(server: RunningServer) -> None:
    chunks = events(server.complete("a", max_tokens=3, stream=True).text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "0 1 2 "
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all("usage" not in chunk for chunk in chunks)
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


def test_usage_in_every_chunk(server: RunningServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"max_tokens": 4, "stream": True, "stream_options": options}
    for response in (server.complete("SLOW", **body), server.chat("SLOW", **body)):
        has_role = '"role"' in response.text
        chunks = events(response.text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[-1] == 4
        assert counts[0] == (0 if has_role else 1)  # with the role nothing is said
        assert chunks[-1]["choices"] == []


def test_several_prompts_and_choices(server: RunningServer) -> None:
    for options in (USAGE, {}):
        response = server.complete(["a", "SLOW"], n=2, max_tokens=3, echo=True, **options)
        texts = dict.fromkeys(range(4), "")
        parts = events(response.text) if options else [response.json()]
        for choice in (choice for part in parts for choice in part["choices"]):
            texts[choice["index"]] += choice["text"]
        assert texts == {0: "a0 1 2 ", 1: "a0 1 2 ", 2: "SLOW0 1 2 ", 3: "SLOW0 1 2 "}
        assert parts[-1]["usage"]["completion_tokens"] == 12


def test_a_choice_that_begins_later_has_the_prompt_once() -> None:
    asked: dict[str, Any] = {"prompt": "ab", "n": 2, "echo": True, "logprobs": 0}
    asked["return_token_ids"] = True
    echoes = [Echo(FakeTokenizer(), "ab", False)]
    writer = CompletionWriter(CompletionRequest(**asked), "", "id", MODEL, echoes=echoes)
    choices = [CompletionOutput(i, logprobs=[], text_offsets=[]) for i in range(2)]
    output = RequestOutput("a", None, [97, 98], choices)
    output.prompt_logprobs = [None, {98: Logprob(-1.0, 1, "b")}]
    parts = []
    for choice in choices:
        choice.text, choice.token_ids, choice.text_offsets = "c", [99], [0]
        choice.logprobs = [{99: Logprob(-1.0, 1, "c")}]
        asyncio.run(writer.prepare(0, output))
        written = [json.loads(chunk[len("data: ") :]) for chunk in writer.chunks(0, output)]
        parts += [part for chunk in written for part in chunk["choices"]]
    assert [part["index"] for part in parts] == [0, 1]
    for part in parts:
        assert (part["text"], part["prompt_token_ids"]) == ("abc", [97, 98])
        assert part["logprobs"]["tokens"] == ["a", "b", "c"]


def test_a_failure_in_mid_stream(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    response = server.complete("DIE", stream=True, max_tokens=40)
    assert response.status_code == 200
    first, *_, error = events(response.text)
    assert first["choices"][0]["text"].startswith("0 ")
    assert error["error"]["code"] == "engine_dead"
    assert error["error"]["type"] == "server_error"
    server.engine.dead_error = None
    stream = server.openai().completions.create(model=MODEL, prompt="DIE", stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


def test_pings_while_silent(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvserve.server.openai.streaming.FIRST_OUTPUT_GRACE", 0.05)
    server = start_server(FakeEngine(), ping_interval=0.05)
    body = {"prompt": "STUCK", "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert [next(lines) for _ in range(4)] == [": ping", "", ": ping", ""]
