"""An upgrade of two replicas as the chart does it (maxSurge 0, maxUnavailable 1): no stream lost.

No cluster: two server processes, and a small proxy that does what a Service does. It gives a new
connection to a replica whose ``/health`` is 200 and that is not being stopped, and copies bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.server.real_server import MODEL, Server
from tests.waiting import WAIT, wait_until

pytestmark = pytest.mark.slow
PROMPTS = [f"<|user|> Let Kevin{n}; Find Kevin" for n in range(6)]
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "stream": True}
SHORT, LONG = 400, 3500
"""Tokens; a long stream outlasts ``PRE_STOP``."""
LATE = 0.3
"""Seconds until the proxy knows that a replica is being stopped."""
PRE_STOP = 0.6
"""Seconds between that and SIGTERM: ``shutdown.preStopSeconds``."""


class Service:
    """The proxy, in a thread of its own."""

    def __init__(self) -> None:
        self.replicas: list[Server] = []
        self.stopped: set[Server] = set()
        self.refused = 0
        """Connections that came while no replica was ready."""
        self._turn = itertools.count()
        self._listening = threading.Event()
        threading.Thread(target=asyncio.run, args=(self._run(),), daemon=True).start()
        self._listening.wait(WAIT)

    def ready(self) -> list[Server]:
        return [each for each in self.replicas if each not in self.stopped and _healthy(each)]

    async def _run(self) -> None:
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        self._listening.set()
        await listener.serve_forever()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ready = await asyncio.to_thread(self.ready)
        if not ready:
            self.refused += 1
            writer.close()
            return
        url = httpx.URL(ready[next(self._turn) % len(ready)].url)
        there, back = await asyncio.open_connection(url.host, url.port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(2**16):
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass  # the other side sees it by what is missing
    finally:
        target.close()


def _healthy(replica: Server) -> bool:
    try:
        return replica.http.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def start() -> Server:
    """Streams get as long as they need, on however busy a machine."""
    return Server("--shutdown-timeout", "600")


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    made.replicas += [start(), start()]
    yield made
    for replica in made.replicas:
        replica.stop()


def stop(service: Service, replica: Server) -> None:
    """As a pod is deleted: the Service learns of it, and after ``preStop`` comes SIGTERM."""
    time.sleep(LATE)
    service.stopped.add(replica)
    time.sleep(PRE_STOP - LATE)
    replica.process.send_signal(signal.SIGTERM)
    assert replica.process.wait(WAIT) == 0
    assert "running requests get" in replica.text, "nothing ran when SIGTERM came"


def test_no_stream_is_lost(service: Service) -> None:
    expected = {prompt: _by_library(openai_of(service), prompt) for prompt in PROMPTS}
    assert len(set(expected.values())) > 1
    over = threading.Event()
    whole: list[tuple[str, str]] = []

    def ask(prompt: str, new_connections: bool) -> None:
        """One after the other, either by connections of their own or by one that is kept."""
        client = openai_of(service)
        while not over.is_set():
            if new_connections:
                whole.append((prompt, _by_hand(service.url, prompt)))
            else:
                whole.append((prompt, _by_library(client, prompt)))

    def more(count: int) -> None:
        enough = len(whole) + count
        wait_until(lambda: len(whole) >= enough)

    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        asking = [pool.submit(ask, prompt, at % 2 == 0) for at, prompt in enumerate(PROMPTS)]
        try:
            more(len(PROMPTS))
            for old in list(service.replicas):
                begun = threading.Event()
                long = pool.submit(_by_hand, old.url, PROMPTS[0], LONG, begun)
                assert begun.wait(WAIT)
                stop(service, old)
                assert long.result().startswith(expected[PROMPTS[0]])
                service.replicas.append(start())
                wait_until(lambda: len(service.ready()) == 2)
                more(len(PROMPTS))
        finally:
            over.set()
    for each in asking:
        each.result()  # raises what a client saw
    assert service.refused == 0
    assert all(text == expected[prompt] for prompt, text in whole)


def openai_of(service: Service) -> openai.OpenAI:
    """With the library's own retries: its kept connection may lead to a replica that stops."""
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=WAIT)


def _by_library(client: openai.OpenAI, prompt: str) -> str:
    body = {**ASKED, "prompt": prompt, "max_tokens": SHORT, "extra_body": {"ignore_eos": True}}
    chunks = list(client.completions.create(**body))
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].text for chunk in chunks)


def _by_hand(
    url: str, prompt: str, tokens: int = SHORT, begun: threading.Event | None = None
) -> str:
    """No retries, no kept connection: every request is answered by the replica it gets."""
    body = {**ASKED, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    lines = []
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as answer:
        assert answer.status_code == 200, answer.read()
        for line in filter(None, answer.iter_lines()):
            lines.append(line.removeprefix("data: "))
            if begun is not None:
                begun.set()
    assert lines[-1] == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert choices[-1]["finish_reason"] == "length"
    return "".join(choice["text"] for choice in choices)
