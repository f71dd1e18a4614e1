"""The image's health check finds the server's port, scheme and socket by its command line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from kvserve.server.cli import healthcheck
from kvserve.server.cli.healthcheck import main, settings_of
from kvserve.server.settings.args import UsageError
from tests.server.conftest import TLS, StartServer
from tests.waiting import WAIT

PYTHON = ("/opt/kvserve/bin/python", "/opt/kvserve/bin/kvserve")


def test_flags_environment_and_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert settings_of([*PYTHON, "--model", "a"]).port == 8000
    assert settings_of([*PYTHON, "serve", "a", "--port", "9000"]).port == 9000
    tini = ["/sbin/docker-init", "--", "kvserve", "--policy", "kara", "--policy.window", "128"]
    assert settings_of([*tini, "--uds", "/run/a.sock"]).uds == "/run/a.sock"
    monkeypatch.setenv("KVSERVE_PORT", "9001")
    assert settings_of(PYTHON).port == 9001
    file = tmp_path / "server.yaml"
    file.write_text("port: 9002\nssl-certfile: /a.pem\nssl-keyfile: /a.key\n")
    monkeypatch.delenv("KVSERVE_PORT")
    read = settings_of([*PYTHON, "--config", str(file)])
    assert (read.port, read.ssl_certfile) == (9002, "/a.pem")
    with pytest.raises(UsageError, match="no kvserve: bash"):
        settings_of(["bash"])


Check = Callable[..., int]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Its status beside a server with these flags."""

    def run(*flags: str) -> int:
        words = "\0".join((*PYTHON, *flags, ""))
        monkeypatch.setattr(healthcheck.Path, "read_bytes", lambda path: words.encode())
        return main()

    monkeypatch.setattr(healthcheck, "_SECONDS", 0.5)
    return run


OK = b'{"status":"ok"}'


@pytest.mark.parametrize(
    ("status", "body", "length", "code"),
    [
        (200, OK, len(OK), 0),
        (503, OK, len(OK), 1),
        (503, b'{"error":{}}', 12, 1),
        (200, b"", len(OK), 1),  # a head, and then nothing: so answered HTTPS once
        (200, OK[:9], len(OK), 1),
        (200, b"", 0, 1),
        (200, b"<html>", 6, 1),
        (200, b"\xff\xfe", 2, 1),
    ],
)
def test_it_reads_what_health_says(
    status: int, body: bytes, length: int, code: int, check: Check
) -> None:
    asked, over = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)
            over.wait(WAIT)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert check("--port", str(server.server_port)) == code
        over.set()
        thread.join(WAIT)
    assert asked == ["/health"]


def test_nobody_is_not_healthy(check: Check, tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        assert check("--port", str(silent.getsockname()[1])) == 1
    assert check("--uds", str(tmp_path / "none")) == 1


@pytest.mark.parametrize("asks", [False, True])
def test_https(check: Check, start_server: StartServer, asks: bool) -> None:
    """Also where clients must show certificates."""
    files = {**TLS, "ssl_ca_certs": TLS["ssl_certfile"]} if asks else TLS
    server = start_server(**files)
    flags = [word for name, file in files.items() for word in (f"--{name.replace('_', '-')}", file)]
    port = str(httpx.URL(server.url).port)
    assert check("--port", port, *flags) == 0
    assert check("--port", port) == 1, "it does not speak HTTPS"
    server.state.draining = True
    assert check("--port", port, *flags) == 1
