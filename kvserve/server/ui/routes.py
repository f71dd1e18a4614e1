"""Routes of the live page, the API's documentation (files of this package) and the events."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kvserve.server.openai.streaming import EventStream
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.api_keys import client_of
from kvserve.server.state.server_state import ServerState
from kvserve.server.ui.event_feed import EventFeed

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    # The browser runs only this server's files and sends nothing to other hosts.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page_files(settings: ServeSettings) -> dict[str, Path]:
    """Files by the path that serves them. They hold no secrets, so they need no API key."""
    pages = {"/": "index.html"} if settings.ui else {}
    if settings.docs:
        pages |= {"/docs": "docs.html", "/redoc": "docs.html"}
    files = sorted(path for path in _PAGE.rglob("*") if path.is_file()) if pages else []
    parts = {
        f"/ui/{path.relative_to(_PAGE).as_posix()}": path
        for path in files
        if path.suffix != ".html"
    }
    return {**{path: _PAGE / name for path, name in pages.items()}, **parts}


def make_router(state: ServerState) -> APIRouter:
    """Routes of the page and its stream. The OpenAPI document leaves the stream out, because it
    never ends."""
    router = APIRouter(tags=["page"])
    feed = EventFeed(state)

    async def events(request: Request) -> Response:
        state.check_health()
        client = client_of(request)
        feed.enter(client)
        return EventStream(feed.events(), lambda: feed.leave(client))

    router.add_api_route("/v1/kv/events", events, include_in_schema=False)
    for path, file in page_files(state.settings).items():
        _add_file(router, path, file)
    return router


def _add_file(router: APIRouter, path: str, file: Path) -> None:
    content, kind = file.read_bytes(), _TYPES[file.suffix]

    async def send() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    router.add_api_route(path, send, methods=["GET", "HEAD"], include_in_schema=False)
