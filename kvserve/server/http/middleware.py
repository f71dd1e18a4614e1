"""The middleware around every route: request ids, API keys, origins, limits on bodies, metrics.

It is plain ASGI, since Starlette's ``BaseHTTPMiddleware`` hides a client's disconnect from routes.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvserve.server.state.api_keys import ApiKeys
from kvserve.server.state.errors import ApiError, as_api_error, unavailable
from kvserve.server.state.metrics import Metrics
from kvserve.server.state.server_state import ServerState

_PROBES = frozenset(
    {
        "/metrics",
        "/health",
        "/ping",
        "/load",
        "/version",
        "/server_info",
        "/v1/kv/stats",
        "/v1/kv/events",
    }
)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def route_path(scope: Scope) -> str:
    """What the router matches: the path without the prefix (``--root-path``) of a proxy."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    inside = path == prefix or path.startswith(f"{prefix}/")
    return path[len(prefix) :] if prefix and inside else path


class RequestIdMiddleware:
    """Gives each request an id (``X-Request-Id``, or a new one) and sends it back.

    Also turns an unhandled exception into the common error body, id included, and asks clients of
    a server that drains to connect anew: their next request then gets another replica.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        state["request_id"] = given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = state["request_id"]
                if "/v1/messages" in scope["path"]:  # the name that Anthropic's clients read
                    headers["Request-Id"] = state["request_id"]
                if self._state.draining:
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except Exception as exc:
            if started:
                raise
            error = as_api_error(exc, state["request_id"])
            await error.response(scope["path"])(scope, receive, send_with_id)


class MetricsMiddleware:
    """Counts and times answers by route, without probes. Unknown paths count as route ``none``."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in _PROBES:
            await self.app(scope, receive, send)
            return
        started, status = time.monotonic(), 500

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            route = scope.get("route")
            handler = "none" if route is None else route.path
            seconds = time.monotonic() - started
            self._metrics.observe_http(handler, scope["method"], status, seconds)


class TurnstileMiddleware:
    """Lets eight complete bodies through per turn of the event loop.

    Otherwise running streams would wait until a whole burst of requests is read and queued.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._turn = asyncio.Semaphore(8)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_in_turn() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body"):
                await self._turn.acquire()
                asyncio.get_running_loop().call_soon(self._turn.release)
            return message

        await self.app(scope, receive_in_turn, send)


class ApiKeyMiddleware:
    """Requires ``Authorization: Bearer KEY``, or Anthropic's ``x-api-key: KEY``, on every path that
    is not in ``open_paths``.

    The number of its client goes with the request (``state["api_key"]``).
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: frozenset[str]) -> None:
        self.app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._allowed(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "missing or wrong API key; send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await error.response(scope["path"])(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        # The router matches the same path, so no protected route can pass for an open one.
        if route_path(scope) in self._open_paths:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers and scheme.lower() != "bearer":
            scheme, key = "bearer", headers["x-api-key"]
        client = self._keys.client(key.strip().encode("latin-1"))  # the bytes that were sent
        if scheme.lower() != "bearer" or client is None:
            return False
        scope.setdefault("state", {})["api_key"] = client
        return True


class OriginMiddleware:
    """Keeps web pages of others away from a server without keys, which any browser nearby can
    reach: 403 for a ``Host`` that is none of the server's names, and for forms of foreign pages.

    A page whose name is made to resolve to this server sends its own name as ``Host`` (DNS
    rebinding); an address in its place is always right. A browser asks before it sends JSON to
    another origin, but not before it sends a form or plain text.
    """

    def __init__(
        self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str], open_paths: frozenset[str]
    ) -> None:
        self.app = app
        self._hosts = {"localhost", socket.gethostname().lower(), *map(str.lower, hosts)}
        self._origins = origins
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._fault(scope) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
        else:
            await error.response(scope["path"])(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if route_path(scope) not in self._open_paths and not self._knows(host):
            return ApiError(
                403,
                f"this server has no key and is not called {host[:100]!r}; start it with "
                "--allowed-hosts, or with --api-key",
                code="unknown_host",
            )
        plain = not headers.get("content-type", "").startswith("application/json")
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or origin is None or not plain:
            return None
        if "*" in self._origins or origin in self._origins or urlsplit(origin).netloc == host:
            return None
        return ApiError(
            403,
            "a page of another origin may send only application/json (--allowed-origins)",
            code="foreign_origin",
        )

    def _knows(self, host: str) -> bool:
        with suppress(ValueError):
            name = urlsplit(f"//{host}").hostname
            if name is None or name in self._hosts or "*" in self._hosts:
                return True
            ipaddress.ip_address(name)
            return True
        return False


class BodyLimitMiddleware:
    """413 for a body of more than ``limit`` bytes, whether ``Content-Length`` says so or not.

    503 while the incomplete bodies of all requests have more than ``BODIES_AT_ONCE * limit`` bytes.
    """

    BODIES_AT_ONCE = 4

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self._limit = limit
        self._held = 0
        """Bytes of all incomplete bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        error = ApiError(413, f"the body is larger than {self._limit} bytes", code="body_too_large")
        announced = Headers(scope=scope).get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            await error.response(scope["path"])(scope, receive, send)
            return
        size = 0

        def hold(more: int) -> None:
            nonlocal size
            size += more
            self._held += more

        async def limited_receive() -> Message:
            message = await receive()
            hold(len(message.get("body", b"")))
            if size > self._limit:
                raise error
            if self._held > self._limit * self.BODIES_AT_ONCE:
                raise unavailable("too many bodies are being sent at once", "busy")
            if not message.get("more_body"):
                hold(-size)  # complete: from here on the queue limits requests
            return message

        try:
            await self.app(scope, limited_receive, send)
        finally:
            hold(-size)
