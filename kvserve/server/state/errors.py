"""One error for every route, in the form of the route's API: OpenAI's is ``{"error": {"message",
"type", "param", "code"}}``, Anthropic's has ``"type": "error"`` beside it.

Clients turn this shape into exceptions; they could not do so with a bare string or a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from kvserve.log import EngineDeadError, RequestError, logger, shown

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_OTHER_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


class ApiError(HTTPException):
    """An error with its status and body. An ``HTTPException``, so that FastAPI does not wrap it."""

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status_code, message, dict(headers) if headers else None)
        self.message = _printable(message)
        self.param = param and _printable(param)
        self.code = code

    def body(self, messages: bool = False) -> dict[str, Any]:
        """``messages``: of Anthropic's routes, whose types have other names."""
        kind = _TYPES.get(self.status_code, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        if not messages:
            return {"error": error}
        return {"type": "error", "error": {**error, "type": _OTHER_TYPES.get(kind, kind)}}

    def response(self, path: str = "") -> Response:
        """``path``: the route's, on which the body's form depends."""
        return Response(
            orjson.dumps(self.body("/v1/messages" in path)),
            status_code=self.status_code,
            headers=self.headers,
            media_type="application/json",
        )


def _printable(text: str) -> str:
    """Replace lone surrogates: orjson cannot encode them."""
    return text.encode(errors="replace").decode()


def unavailable(message: str, code: str) -> ApiError:
    """A 503 that tells clients to try again in 5 seconds."""
    return ApiError(503, message, code=code, headers={"Retry-After": "5"})


def too_many(message: str, code: str = "busy", param: str | None = None) -> ApiError:
    """A 429 that tells clients to try again in a second."""
    return ApiError(429, message, param=param, code=code, headers={"Retry-After": "1"})


def as_api_error(exc: Exception, request_id: str | None = None) -> ApiError:
    """The error that a client gets for ``exc``; unexpected ones are logged and not sent."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, RequestError):
        # The client can fix most: some codes mean that the request is not at fault.
        if exc.code == "out_of_memory":
            return unavailable(str(exc), exc.code)
        if exc.code in ("too_many_policies", "too_many_traces"):
            return too_many(str(exc), exc.code, exc.param)
        status = 500 if exc.code == "internal_error" else 400
        return ApiError(status, str(exc), param=exc.param, code=exc.code or "invalid_value")
    if isinstance(exc, RequestValidationError):
        return _validation_error(exc.errors())
    if isinstance(exc, ClientDisconnect):  # only the access log shows it
        return ApiError(499, "the client closed the connection", code="client_closed_request")
    if isinstance(exc, EngineDeadError):
        return ApiError(500, f"the engine stopped: {exc}", code="engine_dead")
    name = f" ({request_id})" if request_id else ""
    logger.error("unexpected error while serving a request%s", name, exc_info=exc)
    message = f"internal error; the server's log has the details{name}"
    return ApiError(500, message, code="internal_error")


def install_handlers(app: FastAPI) -> None:
    """Answer these exceptions of all routes with our error body.

    ``RequestIdMiddleware`` does so for any other exception.
    """

    async def handle(request: Request, exc: Exception) -> Response:
        if isinstance(exc, StarletteHTTPException) and not isinstance(exc, ApiError):
            return _http_error(exc, request).response(request.url.path)
        error = as_api_error(exc, getattr(request.state, "request_id", None))
        response = error.response(request.url.path)
        _drop_frames(exc)
        return response

    for kind in (
        RequestError,
        EngineDeadError,
        RequestValidationError,
        StarletteHTTPException,
        ClientDisconnect,
    ):
        app.add_exception_handler(kind, handle)


def _drop_frames(exc: Exception) -> None:
    """Free what the frames of a refusal hold, such as a body of megabytes.

    Exceptions and frames refer to each other, so reference counting does not free them, and the
    garbage collector runs late because so few objects are involved.
    """
    errors = exc.errors() if isinstance(exc, RequestValidationError) else ()
    raised = [error["ctx"].get("error") for error in errors if "ctx" in error]  # by validators
    for each in (exc, *raised):
        if isinstance(each, Exception):  # for invalid JSON it is a text
            each.__traceback__ = each.__context__ = each.__cause__ = None


def _http_error(exc: StarletteHTTPException, request: Request) -> ApiError:
    """Routing errors: no such route, or not with this method."""
    where, message = f"{request.method} {request.url.path:.100}", str(exc.detail)
    if exc.status_code == 404:
        listed = "; /openapi.json lists what there is" if request.app.openapi_url else ""
        message = f"there is no {where} here{listed}"
    headers = exc.headers
    if exc.status_code == 405:
        # The router names the methods of one route of this path alone.
        scopes = ({**request.scope, "method": method} for method in ("GET", "HEAD", "POST"))
        routes = request.app.routes
        allowed = [
            scope["method"]
            for scope in scopes
            if any(route.matches(scope)[0] == Match.FULL for route in routes)
        ]
        message = f"{where} is not allowed; use {' or '.join(allowed) or 'another'}"
        headers = {"Allow": ", ".join(allowed)}
    return ApiError(
        exc.status_code,
        message,
        code=_CODES.get(exc.status_code, "invalid_request"),
        headers=headers,
    )


# ---- validation -------------------------------------------------------------------------------


def _validation_error(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first error, by the field's name: a list of all would hide the one that matters."""
    first = _of_union(errors)
    kind, param = first["type"], _param(first["loc"][1:])
    cause = first.get("ctx", {}).get("error")
    if kind == "json_invalid":
        message = f"the body is not valid JSON: {cause} at character {first['loc'][-1]}"
        return ApiError(400, message, code="invalid_json")
    if isinstance(cause, RequestError):
        param = ".".join(filter(None, (param, cause.param))) or None
        return ApiError(400, str(cause), param=param, code=cause.code or "invalid_value")
    if param is None:
        message = "the body must be a JSON object sent with Content-Type: application/json"
        return ApiError(400, message, code="invalid_json")
    if kind == "missing":
        return ApiError(400, f"{param} is required", param=param, code="missing_field")
    if kind == "int_parsing_size":
        first = {**first, "msg": "Input should be an integer of at most 64 bits"}
    what = re.sub("^(Input|String) should", "must", str(first["msg"]))
    what = re.sub("a valid dictionary( or instance of \\w+)?", "an object", what)
    what = what.replace("a valid list", "a list")
    given = shown(first["input"])
    given = given if len(given) <= 80 else f"{given[:77]}..."
    message = f"{param} {what}, got {given}"
    return ApiError(400, message, param=param, code="invalid_value")


def _of_union(errors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first error; of a field that may also be a text, what its other form says."""
    first, *others = errors
    *place, kind = first["loc"]
    if kind != "str":
        return first
    others = [each for each in others if [*each["loc"][: len(place)]] == place]
    deepest = max(others, key=lambda each: len(each["loc"]))
    if within := deepest["loc"][len(place) + 1 :]:
        return {**deepest, "loc": (*place, *within)}
    either = str(deepest["msg"]).removeprefix("Input should be")
    return {**first, "loc": place, "msg": f"Input should be a string or{either}"}


def _param(loc: Sequence[str | int]) -> str | None:
    """``("messages", 0, "content")`` -> ``messages[0].content``; keys of free maps are left out."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}"
        else:
            break
    return path.removeprefix(".") or None
