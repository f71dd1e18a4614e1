"""Hub ids through the real client, against a hub of our own on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import WAIT

SHA = {"main": "a" * 40, "v2": "b" * 40}
SMALL = ["config.json", "tokenizer.json"]
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
OTHERS = ["consolidated.safetensors", "original/params.json", "pytorch_model.bin", "README.md"]
FILES = {name: name.encode() for name in (*SMALL, *SHARDS, *OTHERS, "tokenization_own.py")}
SCRIPT = """
    import json, sys
    from pathlib import Path
    from kvserve.engine.models.hub import find_model
    from kvserve.log import ConfigError

    for name, options in json.loads(sys.argv[1]):
        try:
            found = find_model(name, **options)
            files = {f.name: f.read_text() for f in found.rglob("*") if f.is_file()}
            print(json.dumps(files))
        except ConfigError as error:
            print(json.dumps(str(error)))
"""


class Hub(BaseHTTPRequestHandler):
    """owner/open and, for those who send the right token, owner/gated; each with two revisions."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        parts = path.split("/")
        if parts[0] == "api":
            owner, repo, what, revision = parts[2:6]
            if (owner, repo) not in (("owner", "open"), ("owner", "gated")):
                return self.answer(404, {"X-Error-Code": "RepoNotFound"})
            sha = SHA.get(revision, revision)
            if sha not in SHA.values():
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            if what == "revision":
                siblings = [{"rfilename": name} for name in FILES]
                body: Any = {"id": f"{owner}/{repo}", "sha": sha, "siblings": siblings}
            else:
                body = [
                    {"type": "file", "path": n, "size": len(b) + 2, "oid": sha[0] * 40}
                    for n, b in FILES.items()
                ]
            return self.answer(200, {}, json.dumps(body).encode())
        (owner, repo, _, sha), name = parts[:4], "/".join(parts[4:])
        if repo == "gated" and self.headers.get("Authorization") != "Bearer right":
            return self.answer(401, {"X-Error-Code": "GatedRepo"})
        headers = {"X-Repo-Commit": sha, "ETag": f'"{sha[0]}{list(FILES).index(name)}"'}
        self.answer(200, headers, FILES[name] + f"@{sha[0]}".encode())

    do_HEAD = do_GET

    def answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def find(
    endpoint: str, home: Path, calls: list[tuple[str, dict[str, Any]]], **env: str
) -> list[Any]:
    """For each call the files found, or the error."""
    drop = ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE")
    inherited = {name: value for name, value in os.environ.items() if name not in drop}
    ours = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "*"}
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), json.dumps(calls)]
    done = subprocess.run(
        command, env={**inherited, **ours, **env}, capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_is_downloaded_kept_and_refused(endpoint: str, nobody: str, tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    found = find(
        endpoint,
        home,
        [
            ("owner/open", {}),
            ("owner/open", {"revision": "v2", "weights": False, "download_dir": str(other)}),
            ("owner/open", {"weights": False, "code": True}),
            ("owner/open", {"revision": "v3"}),
            ("owner/none", {}),
            ("owner/gated", {}),
            ("owner/none", {"flag": "--tokenizer"}),
        ],
    )
    assert found[0] == {name: f"{name}@a" for name in (*SMALL, *SHARDS)}
    assert found[1] == {name: f"{name}@b" for name in SMALL}
    assert "tokenization_own.py" in found[2]
    assert found[3] == "--model: owner/open has no revision 'v3'; give another --revision"
    assert found[4].startswith("--model: the hub has no owner/none, or it is private;")
    assert found[5].startswith("--model: owner/gated is gated; accept its licence at https://")
    assert found[6].startswith("--tokenizer: ")
    assert (other / "models--owner--open").exists()

    (allowed,) = find(endpoint, home, [("owner/gated", {})], HF_TOKEN="right")
    assert set(allowed) == {*SMALL, *SHARDS}

    calls: list[tuple[str, dict[str, Any]]] = [
        ("owner/open", {}),
        ("owner/open", {"revision": "v2"}),
        ("owner/open", {"download_dir": str(other)}),
        ("owner/open", {"revision": "v2", "download_dir": str(other)}),
    ]
    offline = find(nobody, home, calls, HF_HUB_OFFLINE="1")
    assert set(offline[0]) == {*SMALL, *SHARDS, "tokenization_own.py"}
    nowhere = "--model: owner/open is no directory here, is not in"
    assert offline[1].startswith(f"{nowhere} the cache that HF_HOME names, and the hub cannot be")
    assert offline[2].startswith(f"{nowhere} {other}, and the hub cannot be asked")
    assert "the hub cannot be asked" in offline[3], "its weights were never downloaded"
