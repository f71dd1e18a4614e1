"""HTTPS: everything that clients get without it, and every limit that holds without it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.request import Request, urlopen

import httpx
import pytest
import uvloop

from kvserve.log import ConfigError
from kvserve.server.http import http_protocol
from kvserve.server.settings.serve_settings import ServeSettings
from tests.server.conftest import MODEL, TLS, RunningServer, StartServer, run_server
from tests.server.fake_engine import FakeEngine
from tests.waiting import WAIT, wait_until

TRUSTED = ssl.create_default_context(cafile=TLS["ssl_certfile"])
LONG = {"model": MODEL, "prompt": "a", "max_tokens": 90_000}
LOOPS = {"asyncio": asyncio.run, "uvloop": uvloop.run}


@pytest.fixture(scope="module", params=LOOPS)
def secure(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    engine = FakeEngine(max_model_len=100_000)
    yield from run_server(engine, run=LOOPS[request.param], **TLS)


def connect(server: RunningServer, context: ssl.SSLContext = TRUSTED) -> ssl.SSLSocket:
    """A connection that takes little at once."""
    url = httpx.URL(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(WAIT)
    client.connect((url.host, url.port or 443))
    return context.wrap_socket(client, server_hostname="localhost")


def send(client: socket.socket, body: dict[str, Any]) -> None:
    content = json.dumps(body)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())


def test_whole_answers_on_one_connection(secure: RunningServer) -> None:
    """No answer had a body: the head alone filled a TLS transport whose limit was 0."""
    url = httpx.URL(secure.url)
    client = http.client.HTTPSConnection(url.host, url.port, timeout=WAIT, context=TRUSTED)
    client.connect()
    first = client.sock
    for count in (1, 5, 8_000):
        client.request(
            "POST",
            "/v1/completions",
            json.dumps({**LONG, "max_tokens": count}),
            {"Content-Type": "application/json"},
        )
        answer = json.loads(client.getresponse().read())
        assert answer["choices"][0]["text"] == "".join(f"{i} " for i in range(count))
        assert client.sock is first
    for path in ("/health", "/version", "/metrics", "/openapi.json", "/"):
        client.request("GET", path)
        assert client.getresponse().read(), path
    client.close()


def test_clients(secure: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", TLS["ssl_certfile"])
    said = "0 1 2 3 4 "
    with secure.openai() as client:
        for stream in (False, True):
            answer: Any = client.completions.create(
                model=MODEL, prompt="a", max_tokens=5, stream=stream
            )
            parts = answer if stream else [answer]
            assert "".join(part.choices[0].text for part in parts) == said
    messages = [{"role": "user", "content": "a"}]
    body = {"model": MODEL, "max_tokens": 5, "messages": messages, "stream": True}
    with secure.http.stream("POST", "/v1/messages", json=body) as streamed:
        assert streamed.read().decode().count("content_block_delta") >= 1
    asked = Request(f"{secure.url}/v1/chat/completions", json.dumps(body).encode())
    asked.add_header("Content-Type", "application/json")
    with urlopen(asked, timeout=WAIT, context=TRUSTED) as answered:
        assert answered.read().endswith(b"data: [DONE]\n\n")


def test_a_body_of_many_records(secure: RunningServer) -> None:
    body = {**LONG, "prompt": "a" * 60_000, "max_tokens": 1, "user": "b" * 500}
    answer = secure.http.post("/v1/completions", json=body).json()
    assert answer["usage"]["prompt_tokens"] == 60_001


def test_who_reads_slowly_gets_everything(secure: RunningServer) -> None:
    with connect(secure) as client:
        send(client, {**LONG, "stream": True, "max_tokens": 3000, "logprobs": 5})
        found = b""
        while not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            piece = client.recv(2**14)
            assert piece, "the connection was closed"
            found += piece
            time.sleep(0.001)
    assert b'"2999 "' in found


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("stream", [True, False])
def test_who_does_not_read_is_cut_off(
    stream: bool, loop: str, start_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if all of an answer was written at once, and nothing follows that could wait."""
    monkeypatch.setattr(http_protocol, "_SEND_BUFFER", 4096)
    engine = FakeEngine(max_model_len=100_000)
    server = start_server(engine, run=LOOPS[loop], write_timeout=0.2, **TLS)
    connections = server.uvicorn.server_state.connections
    with connect(server) as client:
        send(client, {**LONG, "stream": stream, "max_tokens": 20_000})
        wait_until(lambda: any(each.unsent for each in connections))  # type: ignore[union-attr]
        wait_until(lambda: not connections)
        wait_until(lambda: not server.state.generations)
        assert b"[DONE]" not in (rest := all_of(client)) and b"}}" not in rest[-10:]


def all_of(client: socket.socket) -> bytes:
    """What came until the server closed."""
    found = b""
    with suppress(OSError):
        while piece := client.recv(2**20):
            found += piece
    return found


def test_what_is_not_tls(secure: RunningServer) -> None:
    """Each is closed, and nobody else is."""
    url = httpx.URL(secure.url)
    where = url.host, url.port or 443
    before = connect(secure)
    plain = httpx.get(f"http://{url.host}:{url.port}/health", timeout=WAIT)
    assert (plain.status_code, plain.json()["error"]["code"]) == (400, "https_required")
    for data in (b"\x16\x03\x01\xff\xff" + b"a" * 70_000, b"\0" * 100, b"SSH-2.0-a\r\n"):
        with socket.create_connection(where, timeout=WAIT) as other:
            other.sendall(data)
            assert b"HTTP" not in all_of(other)
    with socket.create_connection(where, timeout=WAIT) as cut:
        hello = ssl.MemoryBIO()
        half = TRUSTED.wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
        with suppress(ssl.SSLWantReadError):
            half.do_handshake()
        cut.sendall(hello.read()[:-7])
    with before:
        send(before, {**LONG, "max_tokens": 2})
        assert before.recv(20).startswith(b"HTTP/1.1 200")


def test_a_leave_is_answered(secure: RunningServer) -> None:
    """The end of what a client sends is the end of its connection, as without TLS."""
    with connect(secure) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while b"version" not in found:
            found += client.recv(2**14)
        client.unwrap().close()
    wait_until(lambda: not secure.uvicorn.server_state.tasks)


def test_a_handshake_has_a_time_and_a_place(start_server: StartServer) -> None:
    """A connection that said nothing was counted only after its handshake, and had a minute."""
    server = start_server(read_timeout=0.3, max_connections=2, **TLS)
    url = httpx.URL(server.url)
    where = url.host, url.port or 443
    crowd = [socket.create_connection(where, timeout=WAIT) for _ in range(5)]
    wait_until(lambda: len(server.uvicorn.server_state.connections) <= 2)
    assert server.http.get("/health").json() == {"status": "ok"}
    assert [all_of(each) for each in crowd] == [b""] * 5


def test_clients_show_certificates(start_server: StartServer) -> None:
    """The authorities of ``--ssl-ca-certs`` were read, and nobody was asked."""
    server = start_server(ssl_ca_certs=TLS["ssl_certfile"], **TLS)
    with pytest.raises(httpx.TransportError):
        server.http.get("/health")
    shows = ssl.create_default_context(cafile=TLS["ssl_certfile"])
    shows.load_cert_chain(TLS["ssl_certfile"], TLS["ssl_keyfile"])
    assert httpx.get(f"{server.url}/health", verify=shows, timeout=WAIT).status_code == 200
    with pytest.raises(ConfigError, match="--ssl-ca-certs goes with"):
        ServeSettings(ssl_ca_certs=TLS["ssl_certfile"])
