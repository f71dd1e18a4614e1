"""uvicorn's HTTP protocol with our error bodies, and with limits that it lacks: the size of a head,
the number of connections, and the time that a client may take to send a request and to read.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from http import HTTPStatus
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvserve.log import logger
from kvserve.server.http.tls import TlsTransport
from kvserve.server.state.errors import ApiError

MAX_HEAD = 64 * 2**10
"""Most bytes of request line and headers. Proxies in front of a server usually allow fewer."""

_SEND_BUFFER = 2**18
"""Bytes that the system keeps for a client; Linux doubles it. What is beyond waits here."""
_LEAST_RATE = 1024
"""Bytes per second; who reads less does not read."""
MAX_UNSENT = 2**28
"""Bytes that wait for all clients together."""


def _too_long() -> ApiError:
    return ApiError(431, f"the headers are larger than {MAX_HEAD} bytes", code="headers_too_large")


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection. ``limited`` makes the class for a server's settings."""

    read_timeout: ClassVar[float] = 30.0
    """Seconds that a client has to send a head, and again to send a body."""
    write_timeout: ClassVar[float] = 30.0
    """Seconds that a client may go without reading while there is something to read."""
    max_connections: ClassVar[int] = 4096
    tls: ClassVar[ssl.SSLContext | None] = None
    """``None`` serves plain HTTP."""
    unsent: ClassVar[dict[LimitedHttpProtocol, int]] = {}
    """Bytes that wait for clients which do not read, the one that stopped first first."""

    @classmethod
    def limited(
        cls,
        read_timeout: float,
        write_timeout: float,
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> type[LimitedHttpProtocol]:
        """This protocol with other limits, or over TLS; time-outs are in seconds."""
        limits: dict[str, Any] = {
            "read_timeout": read_timeout,
            "write_timeout": write_timeout,
            "max_connections": max_connections,
            "tls": tls,
            "unsent": {},
        }
        return type("LimitedHttpProtocol", (cls,), limits)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = None
        """Bytes so far of the head that is being read; ``None`` if none is."""
        self._fields_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        """Runs while the client has to send a head or the rest of a body."""
        self._unread: asyncio.TimerHandle | None = None
        """Runs while the client has to read."""

    def connection_made(self, transport: Any) -> None:
        if self.tls is not None:
            transport = TlsTransport(transport, self.tls)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # so that any byte left over pauses the writer
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        if len(self.connections) > self.max_connections and not self._make_room():
            message = "too many connections are open (--max-connections)"
            self._refuse(ApiError(503, message, code="too_many_connections"))
            return
        self._expect("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._forget_unsent()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._forget_unsent()
        self._wait_for_reader()
        # The first one is the one that has stopped for longest.
        while sum(self.unsent.values()) > MAX_UNSENT and len(self.unsent) > 1:
            next(iter(self.unsent))._drop()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unsent()

    def on_message_begin(self) -> None:
        self._head_bytes = self._fields_bytes = 0
        self._expect("head")
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._fields_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        if self._fields_bytes > MAX_HEAD:  # it came at once, and is not incomplete at any time
            self._refuse(_too_long())
            return
        self._expect("body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._expect(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self.tls is not None:
            data = self._opened(data)
            if not data:
                return
        super().data_received(data)
        if self._timer is None and (self.cycle is None or self.cycle.response_complete):
            self._expect("head")  # empty lines do not begin a request
        if self._head_bytes is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse(_too_long())

    def _opened(self, data: bytes) -> bytes:
        """What a client says over TLS; one that does not speak TLS is closed."""
        transport: Any = self.transport
        try:
            opened: bytes = transport.opened(data)
            return opened
        except ssl.SSLError as error:
            if error.reason == "HTTP_REQUEST":
                self.transport = transport.wire  # it reads the refusal as it wrote: plainly
                self._refuse(ApiError(400, "this port serves HTTPS", code="https_required"))
            transport.close()
            return b""

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

    def _wait_for_reader(self) -> None:
        self.unsent[self] = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.write_timeout, self._check_reader)

    def _check_reader(self) -> None:
        taken = self.unsent[self] - self.transport.get_write_buffer_size()
        if taken < _LEAST_RATE * self.write_timeout:
            self._drop()
        else:
            self._wait_for_reader()

    def _drop(self) -> None:
        """Close a connection whose client does not read, which ends its request."""
        logger.warning("a client did not read its answer for a while: its connection is closed")
        self._forget_unsent()
        self.transport.abort()

    def _forget_unsent(self) -> None:
        self.unsent.pop(self, None)
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
