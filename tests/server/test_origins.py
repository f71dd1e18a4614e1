"""What web pages of others may not do to a server without keys; probes and codings."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from tests.server.conftest import MODEL, RunningServer, run_server
from tests.server.fake_engine import FakeEngine


@pytest.fixture
def local() -> Iterator[RunningServer]:
    yield from run_server(FakeEngine(), allowed_hosts=("127.0.0.1", "llm.example"))


@pytest.mark.parametrize("path", ["/v1/kv/events", "/v1/models", "/v1/kv/stats"])
def test_a_name_that_is_not_the_servers(local: RunningServer, path: str) -> None:
    answer = local.http.get(path, headers={"Host": "rebound.attacker.example:8000"})
    assert answer.status_code == 403 and "--allowed-hosts" in answer.json()["error"]["message"]
    assert answer.headers["X-Request-Id"]


@pytest.mark.parametrize("host", ["localhost:80", "10.1.2.3:9", "[::1]:8000", "LLM.example"])
def test_its_own_names_and_addresses(local: RunningServer, host: str) -> None:
    assert local.http.get("/v1/models", headers={"Host": host}).status_code == 200


def test_probes_may_call_it_anything(local: RunningServer) -> None:
    for path in ("/health", "/metrics"):
        assert local.http.get(path, headers={"Host": "pod.cluster"}).status_code == 200


def test_a_foreign_page_changes_nothing(local: RunningServer) -> None:
    foreign = {"Origin": "https://attacker.example"}
    for path in ("/reset_prefix_cache", "/abort_requests", "/v1/completions"):
        plain = {**foreign, "Content-Type": "text/plain"}
        answer = local.http.post(path, content="{}", headers=plain)
        assert answer.status_code == 403, answer.text
        assert local.http.post(path, headers=foreign).status_code == 403
    assert local.http.post("/reset_prefix_cache", headers={"Origin": local.url}).status_code == 200
    assert local.http.post("/reset_prefix_cache").status_code == 200
    assert local.http.post("/reset_prefix_cache", json={}, headers=foreign).status_code == 200


def test_heads_of_probes(local: RunningServer) -> None:
    for path in ("/health", "/ping", "/version"):
        answer = local.http.head(path)
        assert answer.status_code == 200 and not answer.content


def test_a_compressed_body_is_named(local: RunningServer) -> None:
    body = gzip.compress(json.dumps({"model": MODEL, "prompt": "a"}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    answer = local.http.post("/v1/completions", content=body, headers=headers)
    assert answer.status_code == 415 and "Content-Encoding: gzip" in answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
