"""The client of ``kvserve bench serve``: streamed requests over HTTP, timed chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

from bench.harness.datasets.workload import Workload
from kvserve.event_reader import EventReader

if TYPE_CHECKING:
    import httpx

ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}


class ServerGone(Exception):
    """The server does not answer any more."""


@dataclass
class Answer:
    """One request as its client saw it; times are in seconds of ``time.perf_counter``."""

    sent: float
    prompt_len: int = 0
    output_tokens: int = 0
    text: str = ""
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """(time, tokens) of every chunk."""
    token_ids: list[int] = field(default_factory=list)
    """Only if the request asks for them (``return_token_ids``)."""
    turn: int = 0
    cached: int = 0
    """Prompt tokens that were found in the cache."""
    kv: Mapping[str, int] = field(default_factory=dict)
    """``usage.kv_cache_details`` of a kvserve server."""
    error: str = ""

    @property
    def ended(self) -> float:
        return self.arrivals[-1][0] if self.arrivals else self.sent

    @property
    def e2el(self) -> float:
        """Seconds from sending to the last token."""
        return self.ended - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 where there is only one."""
        more = self.output_tokens - 1
        return (self.e2el - self.ttft) / more if more > 0 else 0.0

    def take(self, event: Mapping[str, Any], now: float) -> None:
        """Add one event of the stream."""
        if event.get("error"):
            self.error = str(event["error"].get("message", event["error"]))
            return
        choices, usage = event.get("choices") or (), event.get("usage") or {}
        text = "".join(
            choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            for choice in choices
        )
        counted = usage.get("completion_tokens")
        # Without usage in every chunk, a chunk counts as one token.
        new = bool(text) if counted is None else counted - self.output_tokens
        self.text += text
        self.token_ids += (token for choice in choices for token in choice.get("token_ids") or ())
        self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or self.cached
        self.output_tokens += new
        self.prompt_len = usage.get("prompt_tokens", self.prompt_len)
        self.kv = usage.get("kv_cache_details") or self.kv
        if text or (new and choices):
            if self.arrivals:
                self.itls.append(now - self.ended)
            else:
                self.ttft = now - self.sent
            self.arrivals.append((now, int(new)))


@dataclass(frozen=True)
class ServingClient:
    """Sends turns of a workload to one endpoint."""

    http: httpx.AsyncClient
    endpoint: str = ENDPOINTS["openai"]
    chat: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of every request's body: the model, the sampling settings, ``--extra-body``."""

    def body(
        self, prompt: list[int], workload: Workload, index: int, said: Sequence[str] = ()
    ) -> dict[str, Any]:
        """The body of a request for what follows ``prompt``."""
        what: dict[str, Any] = {"prompt": prompt}
        if self.chat:
            what = {"messages": workload.messages(index, said)}
        return {
            **what,
            "max_tokens": workload.max_tokens(index),
            "ignore_eos": workload.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **({"return_token_ids": True} if workload.by_ids else {}),
            **self.fields,
        }

    async def ask(self, body: Mapping[str, Any]) -> Answer:
        """Send one request and follow its stream; raises ``ServerGone`` if the server is gone."""
        import httpx

        answer = Answer(perf_counter())
        try:
            async with self.http.stream("POST", self.endpoint, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    answer.error = f"HTTP {response.status_code}: {response.text[:300]}"
                else:
                    stream = EventReader()
                    async for part in response.aiter_bytes():
                        for event in stream.cut(part):
                            answer.take(event, perf_counter())
        except httpx.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and not answer.arrivals:
            answer.error = "the stream ended without a token"
        if answer.error:
            await self.check_alive()
        return answer

    async def check_alive(self) -> None:
        """Raise ``ServerGone`` unless ``/health`` says 200."""
        import httpx

        try:
            status = (await self.http.get("/health", timeout=10)).status_code
        except httpx.HTTPError as error:
            raise ServerGone(f"{type(error).__name__}: {error}") from error
        if status != 200:
            raise ServerGone(f"/health says {status}")

    async def get(self, path: str) -> tuple[dict[str, Any] | None, int]:
        """The JSON at a path, ``None`` if the server does not have the path, and the status."""
        import httpx

        try:
            response = await self.http.get(path, timeout=10)
            found = dict(response.json()) if response.status_code == 200 else None
            return found, response.status_code
        except (httpx.HTTPError, ValueError):
            return None, 0
