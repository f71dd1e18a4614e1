"""uvicorn's HTTP protocol with a limit on heads, which its parser lacks, and our error bodies."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvserve.server.errors import ApiError

MAX_HEAD = 64 * 2**10
"""Bytes of request line and headers; servers in front of this one take less."""


class LimitedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes: int | None = None
        """Of the head that is being read."""

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD:
            self._refuse(ApiError(431, f"the headers are larger than {MAX_HEAD} bytes"))

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1", code="invalid_request"))

    def _refuse(self, error: ApiError) -> None:
        body = error.response().body
        status = HTTPStatus(error.status_code)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + bytes(body))
        self.transport.close()
