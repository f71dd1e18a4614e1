"""Errors that are no field's fault: their status and body, and that the next request works."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from fastapi.exceptions import RequestValidationError

from kvserve.config import CompressionConfig, EngineConfig
from kvserve.log import ConfigError, RequestError
from kvserve.server.settings.reading import check_policies
from kvserve.server.state.errors import ApiError
from tests.server.conftest import MODEL, RunningServer, StartServer
from tests.server.fake_engine import FakeEngine
from tests.server.test_refusals import USER, check
from tests.waiting import WAIT, wait_until


def test_a_field_has_its_name_there_and_the_noun_stays() -> None:
    names = {"prompt": "input"}
    for said, expected in (
        ("prompt must not be empty", "input must not be empty"),
        ("a prompt of 9 tokens needs 3 blocks", "a prompt of 9 tokens needs 3 blocks"),
    ):
        renamed = RequestError(said, param="prompt").renamed(names)
        assert (str(renamed), renamed.param) == (expected, "input")


def test_refusals_are_freed_at_once(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their frames hold the whole body; 40 of 20,000 biases once held 120 MiB."""
    bodies = (
        *(b'{"prompt": "a", "logit_bias": {"0": "x"}}', b'{"prompt": "a", "kv_policy": 5}'),
        *(b'{"prompt": 5}', b'{"prompt": "a", "n": "x"}', b'{"prompt": "a", "max_tokens": 600}'),
        *(b"{", b'["a"]', b"[" * 300 + b"]" * 300),
    )

    made: list[weakref.ref[Exception]] = []
    kinds: tuple[type[Exception], ...] = (RequestError, RequestValidationError, ApiError)
    for kind in kinds:
        # What is alive is asked of these alone: other threads have garbage of their own.
        def remember(error: Any, *given: Any, begin: Any = kind.__init__, **named: Any) -> None:
            made.append(weakref.ref(error))
            begin(error, *given, **named)

        monkeypatch.setattr(kind, "__init__", remember)

    def refuse(body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        response = server.http.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400, response.text

    gc.disable()
    try:
        for body in bodies:
            made.clear()
            refuse(body)
            assert made
            # An answer comes before its task has ended.
            wait_until(lambda: not any(error() for error in made))
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "content", [b'{"prompt": "a"', b"", b"[]", b'"text"', b"\xff\xfe", b"[" * 5000, b"null"]
)
def test_a_broken_body_says_where(server: RunningServer, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        check(server.http.post(path, content=content, headers=headers), 400)
    response = server.http.post("/v1/completions", content=b'{"prompt": }', headers=headers)
    assert "character 11" in check(response, 400, None, "invalid_json")
    response = server.http.post("/v1/completions", content=b'{"prompt": "a"}')
    assert "Content-Type: application/json" in check(response, 400, None, "invalid_json")


def test_routes_that_do_not_exist(server: RunningServer) -> None:
    message = check(server.http.get("/v2/completions"), 404, None, "not_found")
    assert "no GET /v2/completions" in message
    check(server.http.get("/nowhere"), 404, None, "not_found")
    response = server.http.get("/v1/completions")
    assert "use POST" in check(response, 405, None, "method_not_allowed")
    assert response.headers["Allow"] == "POST"
    check(server.http.delete("/health"), 405, None, "method_not_allowed")


def test_a_body_that_is_too_large(start_server: StartServer) -> None:
    server = start_server(max_body_size=1000)
    check(server.complete("x" * 2000), 413, None, "body_too_large")

    def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    response = server.http.post(
        "/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}
    )
    check(response, 413, None, "body_too_large")
    assert server.complete("x", max_tokens=1).status_code == 200


def test_an_unforeseen_error(server: RunningServer) -> None:
    for stream in (False, True):
        message = check(server.complete("BUG", stream=stream), 500, None, "internal_error")
        assert "secret" not in message
    assert server.complete("next", max_tokens=1).status_code == 200


def test_an_unforeseen_error_outside_the_engine(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(stats: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr("kvserve.server.http.info_routes.kv_stats", fail)
    assert "secret" not in check(server.http.get("/v1/kv/stats"), 500, None, "internal_error")


def test_a_dead_engine(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    check(server.complete("DIE"), 500, None, "engine_dead")
    message = check(server.http.get("/health"), 503, None, "engine_dead")
    assert "out of memory" in message
    check(server.complete("next"), 503, None, "engine_dead")
    assert 'state="dead"} 1.0' in server.http.get("/metrics").text


def test_loading_and_draining(start_server: StartServer) -> None:
    server = start_server(FakeEngine(), ready=False)
    paths = ("/health", "/ping", "/v1/models", "/server_info", "/v1/kv/stats")
    for path in paths:
        check(server.http.get(path), 503, None, "loading")
    for response in (server.complete("a"), server.chat("a"), server.post("/tokenize", prompt="a")):
        check(response, 503, None, "loading")
    assert server.http.get("/version").status_code == 200
    text = server.http.get("/metrics").text
    assert 'state="loading"} 1.0' in text and 'state="ready"} 0.0' in text
    server.state.mark_ready()
    assert server.http.get("/health").status_code == 200
    assert 'state="ready"} 1.0' in server.http.get("/metrics").text
    server.state.draining = True
    response = server.http.get("/health")
    check(response, 503, None, "draining")
    assert response.headers["Retry-After"]
    assert response.headers["Connection"] == "close", "the next request is another replica's"
    check(server.complete("a"), 503, None, "draining")
    assert server.http.get("/metrics").status_code == 200


def test_a_full_queue(start_server: StartServer) -> None:
    config = EngineConfig.from_flat(model=MODEL, max_num_seqs=2)
    server = start_server(config=config, max_queued_requests=1)
    body = {"prompt": ["HALF"] * 2, "max_tokens": 300, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        with httpx.Client(base_url=server.url, timeout=WAIT) as other:
            response = other.post("/v1/completions", json={"prompt": "a", "n": 2})
            assert "--max-queued-requests" in check(response, 429, None, "queue_full")
            assert response.headers["Retry-After"] == "1"
            assert other.post("/v1/completions", json={"prompt": "a"}).is_success
            # What could never be queued is wrong, not early.
            for name, many in (("n", {"prompt": "a", "n": 4}), ("prompt", {"prompt": ["a"] * 4})):
                check(other.post("/v1/completions", json=many), 400, name)
        # The client comes again once it is refused, and by then the others have left.
        hooks: dict[str, list[Callable[..., Any]]] = {"response": [lambda _: running.close()]}
        http: Any  # some clients name httpx by another name
        with httpx.Client(event_hooks=hooks, timeout=WAIT) as http:
            client = openai.OpenAI(
                base_url=f"{server.url}/v1", api_key="none", max_retries=99, http_client=http
            )
            assert client.completions.create(model=MODEL, prompt="a", n=2).choices


@pytest.mark.parametrize(
    ("settings", "allowed", "refused", "said"),
    [
        (
            {"policy": "kara", "allow_request_policy": "none"},
            [None, "none", {"name": "none"}],
            ["kara", {"name": "snapkv"}],
            "--allow-request-policy",
        ),
        (
            {"allow_request_policy": "listed", "request_policies": ("snapkv",)},
            ["none", {"name": "snapkv", "budget": 64}],
            ["kara"],
            "none, snapkv",
        ),
    ],
)
def test_policies_of_requests_may_be_few(
    start_server: StartServer,
    settings: dict[str, Any],
    allowed: list[Any],
    refused: list[Any],
    said: str,
) -> None:
    server = start_server(config=EngineConfig.from_flat(model=MODEL, **settings))
    for policy in allowed:
        assert server.complete("a", kv_policy=policy, max_tokens=1).status_code == 200
    for policy in refused:
        assert said in check(server.complete("a", kv_policy=policy), 400, "kv_policy")


def test_listed_policies_are_there() -> None:
    with pytest.raises(ConfigError, match="--request-policies"):
        EngineConfig.from_flat(allow_request_policy="listed")
    with pytest.raises(ConfigError, match="unknown policy 'krra'"):
        check_policies(CompressionConfig(allow_request_policy="listed", request_policies=("krra",)))


LONG: dict[str, tuple[str, Any]] = {
    "/v1/completions": ("prompt", [97] * 600),
    "/v1/chat/completions": ("messages", [{"role": "user", "content": "a" * 495}]),
    "/v1/responses": ("input", "a" * 495),
    "/v1/messages": ("messages", [{"role": "user", "content": "a" * 495}]),
}
"""Their context has 512 tokens, which are characters. The engine refuses these, since one must be
left to generate; twice as much the server refuses itself."""


@pytest.mark.parametrize("door", LONG)
@pytest.mark.parametrize("much", [1, 2, 2000])
def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_look_for(
    server: RunningServer, door: str, much: int
) -> None:
    """Kind: an error that no client knows: context_window_exceeded never acts. LiteLLM 1.110.2 and
    langchain-openai 1.7.4 look for these words, Claude Code for the numbers, too."""
    name, value = LONG[door]
    if not isinstance(value, str) and name == "messages":
        value = [{"role": "user", "content": value[0]["content"] * much}]
    else:
        value = value * much
    for stream in (False, True):
        answer = server.post(door, **{name: value, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == name
        found = re.match(r"prompt is too long: (\d+) tokens > (\d+) maximum: ", error["message"])
        assert found, error["message"]
        assert int(found[1]) > int(found[2]) and int(found[2]) <= 512


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_an_answer_that_does_not_fit_is_said_so_too(server: RunningServer, field: str) -> None:
    door = "/v1/responses" if field == "max_output_tokens" else "/v1/chat/completions"
    body = {"input": "a"} if door == "/v1/responses" else {"messages": [USER]}
    assert server.complete("abc", max_tokens=508).status_code == 200
    error = server.post(door, **body, **{field: 600}).json()["error"]
    words = rf"prompt is too long: 6\d\d tokens > 512 maximum: {field}=600 does not fit"
    assert re.match(words, error["message"])
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


def test_ids_have_the_header_that_anthropics_clients_read(server: RunningServer) -> None:
    for body, status in (({"messages": [USER], "max_tokens": 3}, 200), ({"messages": []}, 400)):
        answer = server.http.post("/v1/messages", json=body, headers={"X-Request-Id": "mine"})
        assert answer.status_code == status
        assert answer.headers["request-id"] == answer.headers["x-request-id"] == "mine"
    assert "request-id" not in server.complete("a", max_tokens=1).headers
