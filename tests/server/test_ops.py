"""Operating the server: deep health, load, aborts, the prefix cache, the tokenizer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvserve.server.http import info_routes
from tests.server.conftest import MODEL, RunningServer, StartServer
from tests.server.fake_engine import FakeEngine
from tests.waiting import WAIT, wait_until


def test_health_generate(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(FakeEngine())
    assert server.http.get("/health_generate").json() == {"status": "ok"}
    [(ids, params, _)] = server.engine.seen
    assert (len(ids), params.max_tokens) == (1, 1)

    async def hang(*args: Any, **kwargs: Any) -> Any:
        import asyncio

        await asyncio.sleep(3600)

    monkeypatch.setattr(info_routes, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(info_routes.Generation, "_settled", hang)
    response = server.http.get("/health_generate")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stuck"
    wait_until(lambda: not server.state.generations)


def test_load_and_abort(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    with ThreadPoolExecutor(3) as clients:
        one, two, three = (
            clients.submit(server.complete, "HALF", request_id=name)
            for name in ("one", "two", "three")
        )
        wait_until(lambda: server.http.get("/load").json()["server_load"] == 3)
        assert server.http.get("/load").json()["num_requests_running"] == 3
        aborted = server.post("/abort_requests", request_ids=["one", "cmpl-two", "nobody"]).json()
        assert sorted(aborted["aborted"]) == ["cmpl-one", "cmpl-two"]
        codes = {each.result(WAIT).json()["error"]["code"] for each in (one, two)}
        assert codes == {"aborted"} and not three.done()
        wait_until(lambda: len(server.engine.aborted) == 2)
        server.post("/abort_requests", request_ids=["three"])


def test_prefix_cache_and_tokenizer(server: RunningServer) -> None:
    before = server.engine.resets
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert server.post(path).json() == {"status": "ok"}
    assert server.engine.resets == before + 2
    assert server.http.get("/tokenizer_info").json()["chat_template"] == "fake"


def test_fingerprints(start_server: StartServer) -> None:
    server = start_server(FakeEngine())

    def fingerprint(**body: Any) -> str:
        found: str = server.complete("a", max_tokens=1, **body).json()["system_fingerprint"]
        return found

    assert fingerprint() == fingerprint(kv_policy="none") == fingerprint(seed=3)
    assert fingerprint() != fingerprint(kv_policy="kara")
    assert fingerprint(kv_policy={"name": "kara", "window": 64}) != fingerprint(kv_policy="kara")
    chunk = next(iter(server.openai().completions.create(model=MODEL, prompt="a", stream=True)))
    assert chunk.system_fingerprint == fingerprint()
