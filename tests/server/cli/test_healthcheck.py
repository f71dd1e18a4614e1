"""The image's health check finds the server's port, scheme and socket by its command line."""

from __future__ import annotations

import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kvserve.server.cli import healthcheck
from kvserve.server.cli.healthcheck import main, settings_of
from kvserve.server.settings.args import UsageError

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


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_it_asks_for_health(status: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        words = "\0".join((*PYTHON, "--port", str(server.server_port), ""))
        monkeypatch.setattr(healthcheck.Path, "read_bytes", lambda path: words.encode())
        assert main() == code
    assert asked == ["/health"]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        words = "\0".join((*PYTHON, "--port", str(silent.getsockname()[1]), ""))
        assert main() == 1, "nobody listens there"
