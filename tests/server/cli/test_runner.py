"""``kvserve serve`` with a fake engine: start-up, signals, exit status."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvserve.server.cli import runner
from kvserve.server.cli.commands import run as run_command
from kvserve.server.http.http_protocol import MAX_HEAD
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state import server_state
from kvserve.signals import AT_ONCE, ENDING, heeded
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.real_server import Server
from tests.waiting import WAIT, wait_until

CODE = """
import sys
from kvserve.server.cli import commands, runner
from tests.server.fake_engine import FakeEngine

runner.make_engine = lambda config: FakeEngine()
commands.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    server = Server("--served-model-name", "a", "b", code=CODE)
    yield server
    server.stop()


def complete(url: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT)


Serve = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Serve:
    """Run the command in this process, and a client of it in a thread; signals come to this
    process. Returns the exit status, what the client returned, and stderr."""
    listen, ports = runner.listen, queue.Queue[int]()

    @contextlib.contextmanager
    def noted(settings: ServeSettings) -> Iterator[socket.socket]:
        with listen(settings) as listener:
            ports.put(listener.getsockname()[1])
            yield listener

    def run(client: Callable[[str], Any], *argv: str, **engine: Any) -> tuple[int, Any, str]:
        monkeypatch.setattr(runner, "make_engine", lambda config: FakeEngine(**engine))

        def ask() -> Any:
            url = f"http://127.0.0.1:{ports.get(timeout=WAIT)}"
            try:
                return client(url)
            except BaseException:
                for _ in range(2):
                    os.kill(os.getpid(), signal.SIGTERM)
                raise

        with ThreadPoolExecutor(1) as clients:
            asked = clients.submit(ask)
            status = run_command(["serve", "--model", "kvserve/tiny", "--port", "0", *argv])
            return status, asked.result(WAIT), capfd.readouterr().err

    monkeypatch.setattr(runner, "listen", noted)
    monkeypatch.setattr(runner, "freeze_heap", lambda: None)
    for number in ENDING:
        if signal.getsignal(number) is signal.SIG_IGN:  # as whoever runs the tests was told to
            signal.signal(number, signal.SIG_DFL)
    return run


def until_healthy(url: str, status: int) -> None:
    with httpx.Client(base_url=url, timeout=WAIT) as http:

        def found() -> int:
            try:
                return http.get("/health").status_code
            except httpx.ConnectError:
                return 0

        wait_until(lambda: found() == status)


def until_running(url: str, number: int) -> None:
    with httpx.Client(base_url=url, timeout=WAIT) as http:
        wait_until(lambda: http.get("/v1/kv/stats").json()["num_running"] == number)


@pytest.mark.parametrize("number", ENDING)
def test_whatever_ends_it_ends_it_in_order(serve: Serve, number: signal.Signals) -> None:
    """All but two ended it at once: streams were cut, and a folder was left. A terminal that closes
    says so twice."""

    def client(url: str) -> tuple[httpx.Response, str]:
        until_healthy(url, 200)
        stuck = {"prompt": "STUCK", "max_tokens": 40}
        stream = {"prompt": "HALF", "max_tokens": 400, "stream": True}
        with ThreadPoolExecutor(2) as others:
            asked = [others.submit(complete, url, body) for body in (stuck, stream)]
            until_running(url, 2)
            for _ in range(1 + (number not in AT_ONCE)):
                os.kill(os.getpid(), number)
        return asked[0].result(), asked[1].result().text

    status, (answer, text), said = serve(client, "--shutdown-timeout", "0.1")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "draining"
    assert '"code":"draining"' in text and text.endswith("[DONE]\n\n")
    assert status == 0 and "Traceback" not in said and "stopping" not in said


def test_what_it_was_told_to_ignore_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    assert signal.SIGHUP not in heeded() and signal.SIGTERM in heeded()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert signal.SIGHUP in heeded()
    signal.signal(signal.SIGHUP, before)


def test_too_few_files(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Of 20 the first that was not there ended in a traceback."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    monkeypatch.setattr(runner, "make_engine", lambda config: NeverStarted())
    assert run_command(["serve", "--model", "kvserve/tiny", "--port", "0"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert "20 open files (ulimit -n), and a server needs 64" in error


def test_an_error_of_the_system_is_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(config: object) -> None:
        raise OSError(24, "Too many open files", "/a/file")

    monkeypatch.setattr(runner, "make_engine", full)
    assert run_command(["serve", "--model", "kvserve/tiny", "--port", "0"]) == 1
    error = capfd.readouterr().err.splitlines()[-1]
    assert error == "kvserve serve: error: [Errno 24] Too many open files: '/a/file'"


@pytest.mark.parametrize("closed", [(1, 2), (0, 1, 2), (2,), (0,)])
def test_streams_that_are_closed_at_the_start(closed: tuple[int, ...], tmp_path: Path) -> None:
    """A socket got the number of stderr, and at the end Python aborted."""
    path = tmp_path / "socket"
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "--model", "kvserve/tiny", "--uds", str(path)],
        preexec_fn=lambda: [*map(os.close, closed)] and None,
        text=True,
    )
    try:
        wait_until(path.exists, process)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=WAIT) as http:
            wait_until(lambda: http.get("http://localhost/health").status_code == 200)
            for number in closed:
                assert os.readlink(f"/proc/{process.pid}/fd/{number}") == os.devnull
        process.terminate()
        assert process.wait(WAIT) == 0
    finally:
        process.kill()


def test_a_template_that_never_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was "still loading" for ever."""

    def never(*_: object) -> None:
        end = time.monotonic() + WAIT
        while time.monotonic() < end:
            pass

    monkeypatch.setattr(server_state, "TEMPLATE_SECONDS", 0.1)
    monkeypatch.setattr(FakeTokenizer, "forms", never)
    status, _, said = serve(lambda url: None, start_delay=3600.0)
    assert status == 1 and said.splitlines()[-1] == (
        "kvserve serve: error: --chat-template: the model's does not end within 0.1 s; give another"
    )


def test_a_second_signal_stops_at_once(serve: Serve) -> None:
    def client(url: str) -> httpx.Response:
        until_healthy(url, 200)
        with ThreadPoolExecutor(1) as other:
            asked = other.submit(complete, url, {"prompt": "STUCK", "max_tokens": 40})
            until_running(url, 1)
            os.kill(os.getpid(), signal.SIGTERM)
            until_healthy(url, 503)
            os.kill(os.getpid(), signal.SIGTERM)
        return asked.result()

    status, answer, said = serve(client, "--shutdown-timeout", "3600")
    assert (status, answer.status_code) == (0, 503) and "again to stop at once" in said


def test_health_while_loading(serve: Serve) -> None:
    def client(url: str) -> None:
        until_healthy(url, 503)
        os.kill(os.getpid(), signal.SIGTERM)

    status, _, said = serve(client, start_delay=3600.0)
    assert status == 0 and "stopped before" in said and "Traceback" not in said


def test_what_takes_long_is_named(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(runner, "_LOG_INTERVAL", 0.0)
    monkeypatch.setattr(runner.logger, "info", lambda text, *args: said.append(text % args))

    def client(url: str) -> None:
        wait_until(lambda: "still loading, for 0 s: reading the weights" in said)
        os.kill(os.getpid(), signal.SIGTERM)

    assert serve(client, start_delay=3600.0)[0] == 0


def test_an_error_at_the_start(serve: Serve) -> None:
    message = "model-00002-of-00003.safetensors is missing"
    status, _, said = serve(lambda url: None, start_error=message)
    assert status == 1
    assert said.splitlines()[1:] == [f"kvserve serve: error: {message}"]


def test_the_tokenizer_is_looked_at_before_a_model_is_loaded(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTokenizer, "encode", lambda *_, **__: [5, 6])
    flags = "--reasoning-parser", "qwen3"
    status, _, said = serve(lambda url: None, *flags, start_delay=3600.0)
    assert status == 1 and "--reasoning-parser" in said


class NeverStarted(FakeEngine):
    """It would take half an hour."""

    async def start(self) -> None:
        raise AssertionError("the engine was started")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--port", "taken"), "cannot listen on 127.0.0.1"),
        (("--ssl-keyfile", "/none", "--ssl-certfile", "/none"), "error: --ssl-certfile"),
        (("--allow-request-policy", "listed", "--request-policies", "kara", "no"), "'no'"),
        (("--policy", "kara", "--policy.windw", "9"), "--policy.windw: policy kara has no"),
        (("--policy", "karra"), "--policy: unknown policy 'karra'"),
        (("--policy", "snapkv"), "--policy.budget: policy snapkv: budget must be"),
        (("--policy", "kara", "--policy.max-chunk", "6"), "--policy.max_chunk: policy kara: max_"),
        (("--read-timeout", "0"), "--read-timeout"),
        (("--max-connections", "0"), "--max-connections"),
        (("--chat-template", "/nowhere/at/all"), "--chat-template"),
    ],
)
def test_flags_are_read_before_a_model_is_loaded(
    flags: tuple[str, ...],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "make_engine", lambda config: NeverStarted())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        taken.listen()
        words = [port if word == "taken" else word for word in flags]
        free = () if "--port" in flags else ("--port", "0")
        assert run_command(["serve", "--model", "kvserve/tiny", *free, *words]) in (1, 2)
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("kvserve serve: error: ") and named in error


@pytest.mark.parametrize(
    ("data", "status"),
    [
        # One byte too many: what is left unread when a server closes may cost its answer.
        ((b"GET /health HTTP/1.1\r\n" + b"X-Filler: a\r\n" * MAX_HEAD)[: MAX_HEAD + 1], 431),
        ((b"GET /health HTTP/1.1\r\nX-Filler: " + b"a" * MAX_HEAD)[: MAX_HEAD + 1], 431),
        ((b"GET /" + b"a" * MAX_HEAD)[: MAX_HEAD + 1], 431),
        # A whole head that comes at once is incomplete at no time.
        (b"GET /health HTTP/1.1\r\nHost: a\r\nX-Filler: " + b"a" * 69_900 + b"\r\n\r\n", 431),
        (b"HALLO\r\n\r\n", 400),
        (b"POST /health HTTP/1.1\r\nContent-Length: 90000\r\n\r\n" + b"a" * 90_000, 405),
    ],
)
def test_heads_have_a_limit(plain: Server, data: bytes, status: int) -> None:
    address = plain.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), timeout=WAIT) as client:
        client.sendall(data)
        answer = b""
        while not answer.endswith(b"}}") and (part := client.recv(10_000)):
            answer += part
    assert answer.startswith(b"HTTP/1.1 %d " % status) and b'{"error":{"message":"' in answer
    assert b'"code":null' not in answer
    assert httpx.get(f"{plain.url}/health", timeout=WAIT).status_code == 200


def test_it_drains(plain: Server, tmp_path: Path) -> None:
    """The last test of this process."""
    server, url = plain, plain.url
    assert httpx.get(f"{url}/health", timeout=WAIT).status_code == 200

    body = {"prompt": f"UNTIL[{tmp_path / 'go'}]", "max_tokens": 150}
    with ThreadPoolExecutor(2) as others:
        whole = others.submit(complete, url, body)
        stream = others.submit(complete, url, {**body, "stream": True})
        until_running(url, 2)
        server.process.send_signal(signal.SIGTERM)
        until_healthy(url, 503)
        refused = complete(url, body)
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        (tmp_path / "go").touch()
    assert whole.result().json()["usage"]["completion_tokens"] == 150
    text = stream.result().text
    assert text.endswith("data: [DONE]\n\n") and '"149 "' in text
    assert server.wait() == 0
    assert "Traceback" not in server.text
    assert '"POST /v1/completions HTTP/1.1" 200' in server.text
    assert "/health" not in server.text


def test_a_dead_engine_ends_the_server(serve: Serve) -> None:
    def client(url: str) -> int:
        until_healthy(url, 200)
        return complete(url, {"prompt": "DIE"}).status_code

    status, answered, said = serve(client)
    assert (status, answered) == (1, 500)
    assert "the engine stopped: out of memory" in said and "Traceback" not in said
