"""A server over a real socket, in a thread of the test process, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from kvserve.config import EngineConfig
from kvserve.sampling_params import SamplingParams
from kvserve.server.cli.runner import tls_context
from kvserve.server.http.app import create_app
from kvserve.server.http.http_protocol import LimitedHttpProtocol
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.server_state import ServerState
from tests.server.fake_engine import FakeEngine, FakeTokenizer
from tests.server.real_server import Server
from tests.waiting import WAIT, wait_until

MODEL = "org/fake"
CERTIFICATE = Path(__file__).with_name("certificate")
"""Of localhost and 127.0.0.1, for a hundred years; kept here since not every machine has openssl:

openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout key.pem -out cert.pem
-days 36500 -subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1
"""
TLS: dict[str, Any] = {
    "ssl_certfile": str(CERTIFICATE / "cert.pem"),
    "ssl_keyfile": str(CERTIFICATE / "key.pem"),
}


@dataclass
class RunningServer:
    engine: FakeEngine
    state: ServerState
    url: str
    loop: asyncio.AbstractEventLoop
    uvicorn: uvicorn.Server
    http: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        trusted = ssl.create_default_context(cafile=TLS["ssl_certfile"])
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, verify=trusted)

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=WAIT
        )

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "hi", **body: Any) -> httpx.Response:
        return self.post("/v1/completions", model=MODEL, prompt=prompt, **body)

    def chat(self, content: Any = "hi", **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", model=MODEL, messages=messages, **body)

    @property
    def prompts(self) -> list[str]:
        """Texts of what the engine was asked, the newest last."""
        return [FakeTokenizer().decode(ids) for ids, _, _ in self.engine.seen]

    @property
    def params(self) -> SamplingParams:
        """Of the newest request."""
        return self.engine.seen[-1][1]

    @property
    def rendered(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What the chat template got last: messages, and arguments."""
        assert self.engine.tokenizer is not None
        return self.engine.tokenizer.seen

    def call(self, function: Callable[[], Any]) -> Any:
        """What ``function`` returns on the server's loop."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT)


def payloads(answer: httpx.Response) -> list[dict[str, Any]]:
    """What the events of a stream hold, or the whole answer."""
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines] or [answer.json()]


def scored(answer: httpx.Response) -> dict[str, list[Any]]:
    """The log-probabilities of a completion, those of a stream's events in one."""
    parts = [choice["logprobs"] for part in payloads(answer) for choice in part["choices"]]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [item for part in parts if part for item in part[name]] for name in names}


def sent(base_url: str, body: dict[str, Any]) -> socket.socket:
    """A connection with little room for its answer, whose request for a completion is sent."""
    content = json.dumps(body)
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    url = httpx.URL(base_url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((url.host, url.port or 80))
    client.sendall((head + content).encode())
    return client


StartServer = Callable[..., RunningServer]


def run_server(
    engine: FakeEngine,
    config: EngineConfig | None = None,
    ready: bool = True,
    port: int = 0,
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run,
    **settings: Any,
) -> Iterator[RunningServer]:
    names = {"served_model_name": (MODEL, "alias"), "allowed_hosts": ("*",)}
    serves = ServeSettings(**{**names, **settings})
    state = ServerState(engine, config or EngineConfig.from_flat(model=MODEL), serves)
    if ready:
        state.mark_ready()
    loops: list[asyncio.AbstractEventLoop] = []
    tls = tls_context(serves)
    protocol = LimitedHttpProtocol.limited(
        serves.read_timeout, serves.write_timeout, serves.max_connections, tls
    )
    server = uvicorn.Server(
        uvicorn.Config(
            create_app(state), http=protocol, port=port, log_level="error", lifespan="off"
        )
    )

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        await server.serve()

    thread = threading.Thread(target=lambda: run(serve()), daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    scheme = "http" if tls is None else "https"
    running = RunningServer(engine, state, f"{scheme}://127.0.0.1:{port}", loops[0], server)
    try:
        yield running
    finally:
        running.http.close()
        server.should_exit = True
        server.force_exit = True
        thread.join(WAIT)


REAL = (
    *("--policy", "kara", "--policy.window", "32", "--policy.buffer", "8"),
    *("--policy.chunk-budget", "6", "--continuations", "on", "--allow-kv-trace"),
    *("--max-num-seqs", "64", "--num-gpu-blocks-override", "3000"),
    # Everybody waits for a step, and 2048 tokens of a long prompt may take half a second on a core.
    *("--max-num-batched-tokens", "1024"),
    *("--read-timeout", "5", "--write-timeout", "5"),
    *("--max-connections", "300", "--max-body-size", "8MiB"),
)
"""Flags of the real server: it takes seconds to start, so all tests of a worker share one."""


@pytest.fixture(scope="session")
def real_servers() -> Iterator[list[Server]]:
    running: list[Server] = []
    yield running
    for server in running:
        server.stop()


@pytest.fixture
def real_server(real_servers: list[Server]) -> Server:
    """A process with the shipped model and ``REAL``; another one if a test has ended it."""
    if not real_servers or real_servers[-1].process.poll() is not None:
        real_servers.append(Server(*REAL))
    return real_servers[-1]


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """One server for the tests that leave it as it was."""
    yield from run_server(FakeEngine())


@pytest.fixture
def server(shared_server: RunningServer) -> RunningServer:
    shared_server.engine.aborted.clear()
    shared_server.engine.seen.clear()
    return shared_server


@pytest.fixture(scope="module")
def thinking() -> Iterator[RunningServer]:
    """One whose model reasons and calls tools as Qwen3's do."""
    options: Any = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    options["enable_auto_tool_choice"] = True
    yield from run_server(FakeEngine(max_model_len=2000), **options)


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Start servers with an engine or options of their own."""
    started = []

    def start(engine: FakeEngine | None = None, **kwargs: Any) -> RunningServer:
        generator = run_server(engine or FakeEngine(), **kwargs)
        started.append(generator)
        return next(generator)

    yield start
    for generator in started:
        next(generator, None)
