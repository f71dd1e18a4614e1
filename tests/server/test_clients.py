"""Who sent a request: an API key by its number, else an address; requests take turns by it."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.sampling_params import SamplingParams
from kvserve.server.state.api_keys import client_of
from tests.server.conftest import StartServer
from tests.waiting import WAIT

MODEL = "kvserve/tiny"


def test_without_keys_an_address_is_a_client(start_server: StartServer) -> None:
    """Whatever keys it sends: nobody checks them."""
    server = start_server()
    for address, key in (("127.0.0.1", "a"), ("127.0.0.1", "b"), ("127.0.0.2", "a")):
        transport = httpx.HTTPTransport(local_address=address)
        with httpx.Client(transport=transport, base_url=server.url, timeout=WAIT) as http:
            headers = {"Authorization": f"Bearer {key}"}
            http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    clients = [params.client for _, params, _ in server.engine.seen]
    assert clients == ["127.0.0.1", "127.0.0.1", "127.0.0.2"]


def test_a_request_cannot_say_who_it_is_from(start_server: StartServer) -> None:
    server = start_server()
    server.complete("a", client="somebody")
    assert server.engine.seen[0][1].client == "127.0.0.1"


def test_who_fills_the_queue_turns_away_himself(start_server: StartServer) -> None:
    config = EngineConfig.from_flat(model="org/fake", max_num_seqs=8)
    server = start_server(config=config, max_queued_requests=8)
    body = {"prompt": ["HALF"] * 16, "max_tokens": 300, "stream": True}
    transport = httpx.HTTPTransport(local_address="127.0.0.2")
    other = httpx.Client(transport=transport, base_url=server.url, timeout=WAIT)
    with other, server.http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()  # which would close the stream, were it dropped
        next(lines)
        with httpx.Client(base_url=server.url, timeout=WAIT) as same:
            assert same.post("/v1/completions", json={"prompt": "a"}).status_code == 429
        for count, status in ((2, 200), (3, 429)):
            answer = other.post("/v1/completions", json={"prompt": "a", "n": count})
            assert answer.status_code == status


@pytest.mark.parametrize(
    ("host", "client"),
    [
        ("10.0.0.7", "10.0.0.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::", "2001:db8:1:2::/64"),
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("somewhere", "somewhere"),
        (None, ""),  # a Unix socket
    ],
)
def test_a_network_is_a_client(host: str | None, client: str) -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "headers": [],
        "client": None if host is None else (host, 1),
    }
    assert client_of(Request(scope)) == client


async def test_one_request_passes_the_flood_of_another_client() -> None:
    """Through the engine: forty of one client wait, and the other's is among the first to end."""
    config = EngineConfig.from_flat(
        model=MODEL, max_num_seqs=4, max_num_seqs_per_client=2, max_model_len=512
    )
    engine = AsyncEngine(config, mode="thread")
    await engine.start()
    ended: list[str] = []

    async def ask(name: str, client: str) -> None:
        params = SamplingParams(max_tokens=8, ignore_eos=True, client=client)
        async for _ in engine.generate([5, 6, 7], params, name):
            pass
        ended.append(name)

    try:
        flood = [asyncio.create_task(ask(f"flood-{i}", "key 0")) for i in range(40)]
        await asyncio.sleep(0)
        await ask("plain", "key 1")
        assert len(ended) <= 10, ended
        await asyncio.gather(*flood)
    finally:
        await engine.shutdown()
    said = {row[0]: row for row in engine.info.summary}
    assert said["scheduling"][1] == "fcfs, clients take turns"
    assert "at most 2 sequences" in said["scheduling"][2]
    assert said["chunked prefill"][1] == "at most 512 tokens beside decodes"
