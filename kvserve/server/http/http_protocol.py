"""uvicorn's HTTP protocol with our error bodies, and with limits that it lacks: the size of a head,
the number of connections, and the time that a client may take to send a request.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvserve.server.state.errors import ApiError

MAX_HEAD = 64 * 2**10
"""Most bytes of request line and headers. Proxies in front of a server usually allow fewer."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. ``limited`` makes the class for a server's settings."""

    read_timeout: ClassVar[float] = 30.0
    """Seconds that a client has to send a head, and again to send a body."""
    max_connections: ClassVar[int] = 4096

    @classmethod
    def limited(cls, read_timeout: float, max_connections: int) -> type[LimitedHttpProtocol]:
        """This protocol with other limits; ``read_timeout`` is in seconds."""
        limits = {"read_timeout": read_timeout, "max_connections": max_connections}
        return type("LimitedHttpProtocol", (cls,), limits)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = None
        """Bytes so far of the head that is being read; ``None`` if none is."""
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the client has to send a head or the rest of a body."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.max_connections and not self._make_room():
            message = "too many connections are open (--max-connections)"
            self._refuse(ApiError(503, message, code="too_many_connections"))
            return
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._expect("head")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._expect("body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expect(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect("head")  # empty lines do not begin a request
        if self._head_bytes is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse(ApiError(431, f"the headers are larger than {MAX_HEAD} bytes"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1", code="invalid_request"))

    def _expect(self, part: str | None) -> None:
        """Give the client ``read_timeout`` seconds for a part (head, body), or stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if part is not None:
            self._timer = self.loop.call_later(self.read_timeout, self._time_out, part)

    def _time_out(self, part: str) -> None:
        self._timer = None
        message = f"the {part} of the request did not come within {self.read_timeout:g} s"
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _make_room(self) -> bool:
        """Close the connection that has waited longest for its client; ``False`` if none waits."""
        owing = [
            other
            for other in self.connections
            if isinstance(other, LimitedHttpProtocol) and other._timer is not None
        ]
        if not owing:
            return False
        slowest = min(owing, key=lambda other: other._timer.when())  # type: ignore[union-attr]
        slowest._expect(None)
        slowest.transport.abort()
        return True

    def _refuse(self, error: ApiError) -> None:
        """Answer without calling the application, and close the connection."""
        self._expect(None)
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error.response().body
            status = HTTPStatus(error.status_code)
            head = (
                f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + bytes(body))
        self.transport.close()
