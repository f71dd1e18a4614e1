"""Mixed requests of every kind that a server gets, until ``stop``, and their results."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.soak.bombs import grammar_bombs, scored_bombs
from bench.soak.malformed import malformed

WORDS = [
    *("Hello", "there", "Let", "Kevin7", "Rachel8", "Adam", "and", "Find"),
    *("the", "sum", "of", "two", "more", "names", "again"),
]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "find", "parameters": SCHEMA}}
_GIVEN_UP = 120.0


def policies(context: int) -> list[dict[str, Any]]:
    """Every policy that can run beside the server's, with valid arguments."""
    heads: dict[str, Any] = {"query_reduce": "heads"}
    return [
        {"name": "none"},
        {"name": "kara", "window": 64, "buffer": 8, "period": 4, **heads},
        {"name": "streaming_llm", "budget": 96},
        {"name": "h2o", "budget": 96},
        {"name": "snapkv", "budget": 64, "window": 8},
        {"name": "snapkv", "budget": 64, "window": 8, "trigger": "threshold", "threshold": 128},
        {"name": "rkv", "budget": 64, "window": 8},
        {"name": "keydiff", "budget": 96},
        {"name": "chunkkv", "budget": 96, "window": 8},
        {"name": "pyramidkv", "budget": 64, "window": 8},
        {"name": "pyramidinfer"},
        {"name": "dynamickv", "budget": 64, "window": 8},
        {"name": "windowkv", "budget": 96, "window": 16},
        {"name": "adakv", "budget": 64, "window": 8},
        {"name": "spindlekv", "codebook": False},
        {"name": "keydiff", "budget": context},
    ]


@dataclass
class Seen:
    """Results of the requests: counts by kind and status, and anything unexpected."""

    answers: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    cut_streams: int = 0
    surprises: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)

    def surprise(self, what: str) -> None:
        if len(self.surprises) < 200:
            self.surprises.append(f"{time.strftime('%H:%M:%S')} {what}"[:600])


class Traffic:
    """Clients that send one request after the other. ``excused``: whether a fault is going on that
    may fail any request."""

    def __init__(
        self, specs: list[dict[str, Any]], context: int, seed: int, excused: Callable[[], bool]
    ) -> None:
        self.seen = Seen()
        self.url = ""
        self._specs = specs
        self._context = context
        self._rng = random.Random(seed)
        self._excused = excused
        self._stopped = False
        self._count = 0

    async def run(self, clients: int) -> None:
        """Send requests until ``stop``."""
        limits = httpx.Limits(
            max_connections=clients * 3 + 64, keepalive_expiry=2.0
        )  # the server closes idle connections after 5 s
        async with httpx.AsyncClient(timeout=_GIVEN_UP, limits=limits) as http:
            await asyncio.gather(*(self._client(http) for _ in range(clients)), self._bursts(http))

    def stop(self) -> None:
        self._stopped = True

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._stopped:
            if not self.url:
                await asyncio.sleep(0.2)
                continue
            await self._one(http)
            await asyncio.sleep(self._rng.uniform(0.0, 0.2))

    async def _bursts(self, http: httpx.AsyncClient) -> None:
        """Now and then send 48 requests at once."""
        due = time.monotonic() + 20
        while not self._stopped:
            await asyncio.sleep(0.5)
            if self.url and time.monotonic() > due:
                await asyncio.gather(*(self._one(http) for _ in range(48)))
                due = time.monotonic() + self._rng.uniform(20, 60)

    async def _one(self, http: httpx.AsyncClient) -> None:
        self._count += 1
        kind = self._rng.choices(_KINDS, _WEIGHTS)[0]
        url, started = self.url, time.monotonic()
        try:
            await kind(self, http)
        except (httpx.HTTPError, OSError) as error:
            name = f"{kind.__name__.strip('_')}: no answer"
            self.seen.answers[name] += 1
            if not self._is_excused() and self.url == url:
                took = time.monotonic() - started
                self.seen.surprise(f"{name} after {took:.2f} s: {causes(error)}")

    def _is_excused(self) -> bool:
        return self._stopped or self._excused()

    def _text(self, most: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=self._rng.randint(1, most)))

    def _body(self) -> dict[str, Any]:
        spec = self._rng.choice(self._specs)
        body: dict[str, Any] = {
            "prompt": self._text(60),
            "max_tokens": self._rng.randint(1, 160),
            "temperature": self._rng.choice((0.0, 0.7, 1.0)),
            "seed": self._count,
            "kv_policy": spec,
        }
        if self._rng.random() < 0.15:
            body |= {"n": 2}
        if self._rng.random() < 0.1 and spec["name"] == "none":
            body |= {"logprobs": 3}
        return body

    def _judge(self, kind: str, status: int, text: str, *, may: tuple[int, ...] = ()) -> None:
        self.seen.answers[f"{kind}: {status}"] += 1
        fine = status == 200 or status == 429 or status in may
        if not fine and not (status >= 500 and self._is_excused()):
            self.seen.surprise(f"{kind}: {status} {text}")

    # ---- kinds of requests ---------------------------------------------------------------------

    async def _completion(self, http: httpx.AsyncClient) -> None:
        started = time.monotonic()
        answer = await http.post(f"{self.url}/v1/completions", json=self._body())
        self._judge("completion", answer.status_code, answer.text)
        if answer.status_code == 200:
            self.seen.latencies.append(time.monotonic() - started)
            self.seen.tokens += answer.json()["usage"]["completion_tokens"]

    async def _stream(self, http: httpx.AsyncClient) -> None:
        await self._streamed(http, leaves_after=None)

    async def _cut_stream(self, http: httpx.AsyncClient) -> None:
        await self._streamed(http, leaves_after=self._rng.randint(0, 25))

    async def _streamed(self, http: httpx.AsyncClient, leaves_after: int | None) -> None:
        body = {**self._body(), "stream": True}
        kind = "stream" if leaves_after is None else "cut stream"
        url = f"{self.url}/v1/completions"
        async with http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                self._judge(kind, answer.status_code, (await answer.aread()).decode()[:300])
                return
            lines = 0
            async for line in answer.aiter_lines():
                lines += line.startswith("data: ")
                if '"error"' in line[:20] and not self._is_excused():
                    self.seen.surprise(f"{kind}: {line}")
                if leaves_after is not None and lines > leaves_after:
                    self.seen.cut_streams += 1
                    break
            self.seen.answers[f"{kind}: 200"] += 1

    async def _chat(self, http: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": self._text(30)}]
        body = {"messages": messages, "max_tokens": self._rng.randint(1, 60)}
        answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
        self._judge("chat", answer.status_code, answer.text)

    async def _tools(self, http: httpx.AsyncClient) -> None:
        messages = [{"role": "user", "content": self._text(10)}]
        body = {"messages": messages, "tools": [TOOL], "tool_choice": "required", "max_tokens": 80}
        answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
        self._judge("tools", answer.status_code, answer.text)

    async def _schema(self, http: httpx.AsyncClient) -> None:
        wanted = self._rng.choice(({"json": SCHEMA}, {"regex": "[a-z]{3,20}"}, {"choice": WORDS}))
        body = {**self._body(), "structured_outputs": wanted, "max_tokens": 60, "n": 1}
        answer = await http.post(f"{self.url}/v1/completions", json=body)
        self._judge("schema", answer.status_code, answer.text)

    async def _long(self, http: httpx.AsyncClient) -> None:
        """A prompt whose length is up to the limit or slightly beyond."""
        ids = [5 + i * 7 % 300 for i in range(self._rng.randint(200, self._context + 40))]
        spec = self._rng.choice(self._specs)
        count = max(min(20, self._context - len(ids)), 1)
        body = {"prompt": ids, "max_tokens": count, "kv_policy": spec}
        answer = await http.post(f"{self.url}/v1/completions", json=body)
        # A prompt that is longer than a step cannot be pruned.
        too_long = len(ids) + count > self._context or spec["name"] == "pyramidinfer"
        may = (400,) if too_long else ()
        self._judge("long prompt", answer.status_code, answer.text, may=may)

    async def _malformed(self, http: httpx.AsyncClient) -> None:
        wrong = malformed(self._rng.randrange(10**9))
        headers = {"Content-Type": wrong.content_type}
        answer = await http.post(f"{self.url}{wrong.path}", content=wrong.body, headers=headers)
        self.seen.answers[f"malformed: {answer.status_code}"] += 1
        if answer.status_code >= 500 and not self._is_excused():
            self.seen.surprise(f"malformed: {answer.status_code} {answer.text} {wrong}")

    async def _bomb(self, http: httpx.AsyncClient) -> None:
        """A grammar or a request for log-probabilities that once ended the server."""
        body = {**self._body(), "kv_policy": "none", "n": 1, **self._rng.choice(_BOMBS)}
        answer = await http.post(f"{self.url}/v1/completions", json=body)
        self._judge("bomb", answer.status_code, answer.text, may=(400,))

    async def _abort(self, http: httpx.AsyncClient) -> None:
        name = f"soak-{self._count}"
        body = {**self._body(), "max_tokens": 300, "request_id": name}
        sent = asyncio.ensure_future(http.post(f"{self.url}/v1/completions", json=body))
        await asyncio.sleep(0.3)
        try:
            ended = await http.post(f"{self.url}/abort_requests", json={"request_ids": [name]})
        finally:
            answer = await sent
        self._judge("abort", ended.status_code, ended.text)
        self._judge("aborted", answer.status_code, answer.text, may=(499,))

    async def _faulty(self, http: httpx.AsyncClient) -> None:
        """A policy that fails: only its own request may fail."""
        fault, status = self._rng.choice((("raise", 500), ("out_of_memory", 503)))
        spec = {"name": "faulty", "budget": 24, "sinks": 2, "fault": fault}
        body = {"prompt": self._text(30), "max_tokens": 60, "ignore_eos": True, "kv_policy": spec}
        answer = await http.post(f"{self.url}/v1/completions", json=body)
        self.seen.answers[f"faulty policy ({fault}): {answer.status_code}"] += 1
        self.seen.injected[fault] += 1
        if answer.status_code != status and not self._is_excused():
            self.seen.surprise(f"faulty policy {fault}: {answer.status_code} {answer.text}")


def causes(error: BaseException | None) -> str:
    """An error and what raised it: httpx's name of a broken connection does not say why."""
    seen: list[str] = []
    while error is not None and len(seen) < 6:
        seen.append(f"{type(error).__name__} {error}".strip())
        error = error.__cause__ or error.__context__
    return " < ".join(seen)


_Kind = Callable[[Traffic, httpx.AsyncClient], Awaitable[None]]
_KINDS: tuple[_Kind, ...] = (
    Traffic._completion,
    Traffic._stream,
    Traffic._cut_stream,
    Traffic._chat,
    Traffic._tools,
    Traffic._schema,
    Traffic._long,
    Traffic._malformed,
    Traffic._abort,
    Traffic._faulty,
    Traffic._bomb,
)
_WEIGHTS = (20, 15, 25, 6, 3, 5, 4, 25, 2, 0.5, 0.5)
_BOMBS = [*grammar_bombs(), *scored_bombs(1024)[2:]]
