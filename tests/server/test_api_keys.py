"""Keys: what they guard, and those of ``--api-key-file``, which come and go as the server runs."""

from __future__ import annotations

import os
import re
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvserve.log import ConfigError
from kvserve.server.http import answer_routes, info_routes
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.api_keys import ApiKeys
from kvserve.server.ui.routes import make_router
from tests.server.conftest import RunningServer, StartServer
from tests.server.test_refusals import check
from tests.waiting import WAIT

PAGES = ("/", "/docs", "/redoc")
"""They show nothing of the server: they ask for the key, and then for the rest."""


@pytest.fixture
def keyed(start_server: StartServer) -> RunningServer:
    return start_server(api_key=("first", "zweiter Schlüssel"), allowed_origins=("http://a",))


def test_every_route_but_pages_and_probes_wants_a_key(keyed: RunningServer) -> None:
    routers = (
        *(answer_routes.router, answer_routes.anthropic, info_routes.router),
        *(info_routes.operations, make_router(keyed.state)),
    )
    routes: list[Any] = [route for router in routers for route in router.routes]
    found = [(method, route.path) for route in routes for method in route.methods]
    app: Any = keyed.uvicorn.config.app
    known = {path.replace(":path", "") for _, path in found}
    assert app.openapi()["paths"].keys() <= known
    found += [("GET", path) for path in ("/nowhere", "/health/", "//health", "/openapi.json")]
    guarded = set()
    for method, path in found:
        answer = keyed.http.request(method, keyed.url + re.sub(r"\{.*\}", "x", path))
        if path in ("/health", "/ping", "/version", *PAGES) or path.startswith("/ui/"):
            assert answer.status_code == 200
            # Nothing but reading.
            assert keyed.http.request("POST", path, json={}).status_code == 405
            continue
        guarded.add(path)
        assert answer.status_code == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
        if method != "HEAD":
            check(answer, 401, None, "invalid_api_key")
    assert {"/metrics", "/openapi.json", "/v1/kv/events", "/v1/messages", "/flush_cache"} <= guarded


def test_keys(keyed: RunningServer) -> None:
    assert keyed.openai("first").models.list().data
    with pytest.raises(openai.AuthenticationError):
        keyed.openai("wrong").models.list()
    for value in ("Basic first", "Bearer", "Bearer x", "first", "Bearer first x"):
        check(keyed.http.get("/v1/models", headers={"Authorization": value}), 401)
    umlaut = "Bearer zweiter Schlüssel".encode()
    assert keyed.http.get("/v1/models", headers={b"Authorization": umlaut}).is_success
    # As Anthropic's clients send them.
    for key, status in (("first", 200), ("wrong", 401)):
        answer = keyed.http.get("/v1/models", headers={"x-api-key": key})
        assert answer.status_code == status


def replace(file: Path, text: str) -> None:
    """As Kubernetes does: another file under the same name."""
    other = file.with_suffix(".new")
    other.write_text(text)
    os.replace(other, file)


def test_keys_rotate_without_a_restart(
    start_server: StartServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = start_server(api_key=("fixed",), api_key_file=str(file))

    def works(key: str) -> bool:
        headers = {b"Authorization": f"Bearer {key}".encode()}
        answer = server.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
        assert answer.status_code in (200, 401)
        return answer.is_success

    assert [works(key) for key in ("fixed", "old", "new")] == [True, True, False]
    replace(file, "\ufeff# who: us\r\nold\r\n\r\n  # another\nnew, with a comma\nnew\n")
    assert [works(key) for key in ("fixed", "old", "new", "new, with a comma")] == [True] * 4
    for key in ("# who: us", "# another", "with a comma", "\ufeff# who: us", "#"):
        assert not works(key), key
    replace(file, "new\n")
    assert [works(key) for key in ("fixed", "old", "new")] == [True, False, True]
    # A client keeps its number: a new key is not mistaken for who had another.
    clients = [params.client for _, params, _ in server.engine.seen]
    assert clients == [f"key {n}" for n in (0, 1, 0, 1, 3, 2, 0, 3)]
    # What cannot be read changes nothing, and is logged once.
    caplog.clear()
    file.unlink()
    assert works("new") and works("fixed") and not works("old")
    assert len(caplog.records) == 1 and "stay as they were" in caplog.text
    replace(file, " \n# none\n")
    assert works("new") and "has no key" in caplog.text
    replace(file, "newest")
    assert works("newest") and not works("new")


def test_a_file_written_in_place(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a")
    keys = ApiKeys((), str(file))
    assert keys.client(b"a") == 0
    with file.open("a") as opened:
        opened.write("\nb")
    assert (keys.client(b"a"), keys.client(b"b"), keys.client(b"")) == (0, 1, None)


@pytest.mark.parametrize(
    ("text", "said"), [(None, "cannot read"), ("\n", "has no key"), ("# a key?\n", "has no key")]
)
def test_a_server_does_not_start_without_its_keys(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=f"--api-key-file: .*{said}"):
        ApiKeys(("given",), str(file))


def test_a_file_alone_asks_for_keys() -> None:
    assert ServeSettings(api_key_file="keys").has_keys and not ServeSettings().has_keys


def test_a_preflight_needs_no_key(keyed: RunningServer) -> None:
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    response = keyed.http.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "http://a"
    response = keyed.http.get("/v1/models", headers={"Origin": "http://a"})
    assert response.status_code == 401
    assert response.headers["access-control-allow-origin"] == "http://a"


def test_what_pages_may_do_can_be_narrowed(start_server: StartServer) -> None:
    settings = {"allowed_methods": ("GET",), "allow_credentials": True}
    server = start_server(allowed_origins=("http://a",), **settings)
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    response = server.http.options("/v1/completions", headers=headers)
    assert response.status_code == 400
    assert response.headers["access-control-allow-credentials"] == "true"


def test_metrics_may_be_open(start_server: StartServer) -> None:
    server = start_server(api_key=("k",), open_metrics=True)
    assert server.http.get("/metrics").status_code == 200
    check(server.http.get("/server_info"), 401)


@pytest.mark.parametrize("prefix", ["", "/api"])
def test_no_other_spelling_of_a_path_is_open(start_server: StartServer, prefix: str) -> None:
    """What needs no key is what the router takes for the same path."""
    server = start_server(api_key=("k",), root_path=prefix)
    closed = ("v1/models", "metrics", "server_info", "v1/kv/stats", "v1/kv/events")
    spelt = [
        f"{begin}/{path}{end}"
        for begin in ("", "/api", "/api/api", "/health/..", "/version", "/", "/ui")
        for path in closed
        for end in ("", "/", "?a=/health", "/../health", "%2f..%2fhealth")
    ]
    for path in ("/health", f"{prefix}/health", "/version"):
        assert server.http.get(path).status_code == 200, path
    url = httpx.URL(server.url)
    client = HTTPConnection(url.host, url.port, timeout=WAIT)  # sends a path as it is spelt
    for path in spelt:
        client.request("GET", path)
        answer = client.getresponse()
        assert answer.status in (401, 404) and answer.read(), path
    client.close()
