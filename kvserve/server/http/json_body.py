"""Reads request bodies: strict JSON, none of its fields larger than it may be.

The sizes of fields are known before any of them is read: the body is split, and the values that a
field holds are counted without making them. Large bodies are read in a thread: nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import cache
from typing import Any, get_args, get_type_hints

import msgspec
import numpy as np
import orjson
from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

from kvserve.server.openai.fields import check_size
from kvserve.server.openai.protocol import parse
from kvserve.server.state.api_keys import client_of
from kvserve.server.state.beside import CLIENT, LARGE, beside
from kvserve.server.state.errors import ApiError
from kvserve.server.state.server_state import ServerState

MAX_DEPTH = 254
"""Levels of nested lists and objects; orjson can write no more."""
INLINE = 2**14
"""Bodies of up to this many bytes are read on the event loop: a thread costs more."""
_CHUNK = 2**20
_STEPS = np.zeros(256, np.int8)
_STEPS[[ord("["), ord("{")]] = 1
_STEPS[[ord("]"), ord("}")]] = -1


class JsonRoute(APIRoute):
    """A route whose handler gets a ``body``: an object of JSON, validated as what is annotated.

    Lone surrogates, NaN and more than ``MAX_DEPTH`` levels are refused. An integer of more than 64
    bits is read as a float, and integer fields refuse it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = get_type_hints(self.endpoint).get("body")
        if kind is None:
            return super().get_route_handler()
        kinds = get_args(kind) or (kind,)

        async def handle(request: Request) -> Response:
            CLIENT.set(client_of(request))
            raw = await _json(request)
            state: ServerState = request.app.state.server
            context = state.engine.info.max_model_len if state.ready else 0
            LARGE.set(len(raw) > INLINE)
            body = await beside(lambda: read_body(raw, kinds, context))
            response: Response = await self.endpoint(body=body, request=request)
            return response

        return handle


async def _json(request: Request) -> bytes:
    coding = request.headers.get("content-encoding", "identity")
    if coding != "identity":
        raise ApiError(
            415,
            f"Content-Encoding: {coding[:40]} is not read; send the body as it is",
            param="Content-Encoding",
            code="unsupported_encoding",
        )
    body = await request.body()
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise _no_object()
    return body


def _no_object() -> ApiError:
    message = "the body must be a JSON object sent with Content-Type: application/json"
    return ApiError(400, message, code="invalid_json")


def read_body(raw: bytes, kinds: Sequence[type[BaseModel]], context: int) -> BaseModel:
    """A body as the first of ``kinds`` whose fields it has.

    ``context``: the model's, on which it depends how much a field may hold. Raises ``ApiError``,
    ``RequestError`` or ``RequestValidationError``.
    """
    fields = _fields(raw) if len(raw) <= INLINE else _large_fields(raw, tuple(kinds), context)
    needs = [{n for n, f in kind.model_fields.items() if f.is_required()} for kind in kinds]
    at = next((i for i, needed in enumerate(needs) if needed <= fields.keys()), len(kinds) - 1)
    return parse(kinds[at], fields)


def _fields(raw: bytes) -> dict[str, Any]:
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and measure(raw)[2] > MAX_DEPTH:
        raise _too_deep()
    value = _value(raw)
    if not isinstance(value, dict):
        raise _no_object()
    return value


def _value(raw: bytes | memoryview) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        invalid = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.msg},
        }
        raise RequestValidationError([invalid]) from None


def _large_fields(raw: bytes, kinds: tuple[type[BaseModel], ...], context: int) -> dict[str, Any]:
    """As ``_fields``, but fields that no kind has are not read."""
    try:
        split = msgspec.json.decode(raw, type=_object_of(kinds))
    except msgspec.ValidationError:
        raise _no_object() from None
    except RecursionError:
        raise _too_deep() from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    fields = {}
    for name in split.__struct_fields__:
        part = memoryview(getattr(split, name))
        if not part:
            continue
        values, lists, depth = measure(part)
        if depth > MAX_DEPTH:
            raise _too_deep()
        check_size(name, len(part), values, lists, context)
        fields[name] = _value(part)
    return fields


@cache
def _object_of(kinds: tuple[type[BaseModel], ...]) -> type[msgspec.Struct]:
    """An object of which the fields of these kinds are taken, unread."""
    names: dict[str, None] = {}
    for kind in kinds:
        names |= dict.fromkeys(kind.model_fields)
        names |= dict.fromkeys(getattr(kind, "further_fields", ()))
    fields = [(name, msgspec.Raw, msgspec.Raw()) for name in names]
    return msgspec.defstruct("Fields", fields)


def measure(raw: bytes | memoryview) -> tuple[int, int, int]:
    """How many values JSON text holds, how many of them are lists or objects, and in how many
    levels; no value is made.

    Strings are passed over. The interpreter lock is free most of the time.
    """
    commas = lists = level = deepest = start = 0
    inside = np.uint8(0)
    while start < len(raw):
        end = min(start + _CHUNK, len(raw))
        while end < len(raw) and raw[end - 1] == ord("\\"):
            end += 1  # what it escapes belongs to it
        piece, start = bytes(raw[start:end]), end
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        codes = np.frombuffer(piece, np.uint8)
        quoted = np.bitwise_xor.accumulate((codes == ord('"')).view(np.uint8)) ^ inside
        inside = quoted[-1]
        outside = codes[quoted == 0]
        if not len(outside):
            continue
        steps = _STEPS[outside]
        lists += int(np.count_nonzero(steps == 1))
        commas += int(np.count_nonzero(outside == ord(",")))
        levels = np.cumsum(steps, dtype=np.int32)
        deepest = max(deepest, level + int(levels.max()))
        level += int(levels[-1])
    return commas + lists, lists, deepest


def _too_deep() -> ApiError:
    message = f"the body nests lists and objects deeper than {MAX_DEPTH} levels"
    return ApiError(400, message, code="invalid_json")
