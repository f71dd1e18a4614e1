"""Keeps web pages of others away from a server without keys, which any browser nearby can reach."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

from starlette._utils import get_route_path
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from kvserve.server.state.errors import ApiError


class OriginMiddleware:
    """403 for a ``Host`` that is none of the server's names, and for forms of foreign pages.

    A page whose name is made to resolve to this server sends its own name as ``Host`` (DNS
    rebinding); an address in its place is always right. A browser asks before it sends JSON to
    another origin, but not before it sends a form or plain text.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Sequence[str],
        origins: Sequence[str],
        open_paths: frozenset[str],
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
            await error.response()(scope, receive, send)

    def _fault(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if get_route_path(scope) not in self._open_paths and not self._knows(host):
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
