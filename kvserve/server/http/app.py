"""Builds the application from routes, middleware and error handlers."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import kvserve
from kvserve.server.http import answer_routes, info_routes
from kvserve.server.http.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    MetricsMiddleware,
    OriginMiddleware,
    RequestIdMiddleware,
    TurnstileMiddleware,
)
from kvserve.server.http.schemas import ERRORS
from kvserve.server.state.api_keys import ApiKeys
from kvserve.server.state.errors import install_handlers
from kvserve.server.state.server_state import ServerState
from kvserve.server.ui import routes as ui_routes

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def create_app(state: ServerState) -> FastAPI:
    """An ASGI application over ``state``; the caller starts the engine and marks it ready."""
    settings = state.settings
    app = FastAPI(
        title="kvserve",
        version=kvserve.__version__,
        docs_url=None,  # FastAPI's pages load from a CDN; ours are in `server/ui`
        redoc_url=None,
        openapi_url="/openapi.json" if settings.docs else None,
        responses=ERRORS,
    )
    app.root_path = settings.root_path
    app.state.server = state
    app.include_router(answer_routes.router)
    app.include_router(answer_routes.anthropic)
    app.include_router(info_routes.router)
    app.include_router(info_routes.operations)
    app.include_router(ui_routes.make_router(state))
    install_handlers(app)
    # Middleware added last is outermost, so refusals carry the request id and CORS headers too.
    app.add_middleware(BodyLimitMiddleware, limit=settings.max_body_size)
    if settings.has_keys:
        keys = ApiKeys(settings.api_key, settings.api_key_file)
        open_paths = OPEN_PATHS | ui_routes.page_files(settings).keys()
        open_paths |= {"/metrics"} if settings.open_metrics else set()
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=open_paths)
    else:
        app.add_middleware(
            OriginMiddleware,
            hosts=("*",) if settings.uds else (settings.host, *settings.allowed_hosts),
            origins=settings.allowed_origins,
            open_paths=OPEN_PATHS | {"/metrics"},
        )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            expose_headers=["X-Request-Id", "Request-Id", "X-Kvserve-Skipped"],
        )
    app.add_middleware(TurnstileMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=state.metrics)
    app.add_middleware(RequestIdMiddleware, state=state)
    return app
