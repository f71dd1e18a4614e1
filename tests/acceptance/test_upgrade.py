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
ASKED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 400,
    "temperature": 0,
    "extra_body": {"ignore_eos": True},
}
LATE = 0.3
"""Seconds until the proxy knows that a replica is being stopped."""
PRE_STOP = 1.0
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


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    made.replicas += [Server(), Server()]
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
                whole.append((prompt, _by_hand(service, prompt)))
            else:
                whole.append((prompt, _by_library(client, prompt)))

    def more(count: int) -> None:
        enough = len(whole) + count
        wait_until(lambda: len(whole) >= enough)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        asking = [pool.submit(ask, prompt, at % 2 == 0) for at, prompt in enumerate(PROMPTS)]
        try:
            more(len(PROMPTS))
            for old in list(service.replicas):
                stop(service, old)
                assert "running requests get" in old.text, "nothing ran when SIGTERM came"
                service.replicas.append(Server())
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
    chunks = list(client.completions.create(prompt=prompt, stream=True, **ASKED))
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].text for chunk in chunks)


def _by_hand(service: Service, prompt: str) -> str:
    """No retries, no kept connection: every request is answered by the replica it gets."""
    body = {**ASKED, **ASKED["extra_body"], "prompt": prompt, "stream": True}
    del body["extra_body"]
    parts = []
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=WAIT) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        parts.append(json.loads(line)["choices"][0]["text"])
    return "".join(parts)
