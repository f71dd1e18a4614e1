"""TLS over the transport of a socket, by the standard library's ``ssl``.

The TLS transports of event loops keep bytes below their own buffer, where no limit and no count of
the protocol sees them. Here all that waits for a client waits in the socket's transport, as without
TLS; so what limits clients (`http_protocol.py`) is the same for both.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Any

_PIECE = 2**18
"""Bytes that are encrypted or decrypted at once."""


class TlsTransport:
    """Encrypts what is written; ``opened`` decrypts what came. The rest is the socket's own."""

    def __init__(self, wire: asyncio.Transport, context: ssl.SSLContext) -> None:
        self.wire = wire
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        if name == "sslcontext":
            return self._context
        return self.wire.get_extra_info(name, default)

    def opened(self, data: bytes) -> bytes:
        """What the client says by ``data``: nothing yet, while it and the server shake hands.

        ``ssl.SSLError`` for what is not TLS; the client has been sent the alert then. A client that
        takes its leave is closed.
        """
        self._incoming.write(data)
        pieces = []
        try:
            while piece := self._session.read(_PIECE):
                pieces.append(piece)
            self.close()
        except ssl.SSLWantReadError:
            pass
        finally:
            self._flush()
        return b"".join(pieces)

    def write(self, data: bytes) -> None:
        """Send ``data``; dropped before the handshake and after ``close``."""
        if self.wire.is_closing() or self._session.version() is None:
            return
        view = memoryview(data)
        for start in range(0, len(view), _PIECE):
            self._session.write(view[start : start + _PIECE])
            self._flush()

    def close(self) -> None:
        """Close once all is sent; the last of it says that nothing follows."""
        if self.wire.is_closing():
            return
        with suppress(ssl.SSLError):  # nobody waits for the client's last word
            self._session.unwrap()
        self._flush()
        self.wire.close()

    def _flush(self) -> None:
        if self._outgoing.pending and not self.wire.is_closing():
            self.wire.write(self._outgoing.read())
