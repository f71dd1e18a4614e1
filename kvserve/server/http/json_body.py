"""Reads request bodies: strict JSON, nested no deeper than the code behind can handle."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from kvserve.server.state.errors import ApiError

MAX_DEPTH = 254
"""Levels of nested lists and objects; orjson can write no more."""


class JsonRequest(Request):
    """A request whose JSON has no lone surrogates, no NaN, and no more than ``MAX_DEPTH`` levels.

    An integer of more than 64 bits is read as a float, and integer fields refuse it.
    """

    async def json(self) -> Any:
        if not hasattr(self, "_value"):
            coding = self.headers.get("content-encoding", "identity")
            if coding != "identity":
                raise ApiError(
                    415,
                    f"Content-Encoding: {coding[:40]} is not read; send the body as it is",
                    param="Content-Encoding",
                    code="unsupported_encoding",
                )
            self._value = read_json(await self.body())
        return self._value


class JsonRoute(APIRoute):
    """A route whose handler gets a ``JsonRequest``."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json


def read_json(body: bytes) -> Any:
    """The value of a body. ``orjson.JSONDecodeError`` if not JSON, ``ApiError`` if too deep."""
    value = orjson.loads(body)
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        try:
            orjson.dumps(value)
        except orjson.JSONEncodeError:
            raise ApiError(
                400,
                f"the body nests lists and objects deeper than {MAX_DEPTH} levels",
                code="invalid_json",
            ) from None
    return value
