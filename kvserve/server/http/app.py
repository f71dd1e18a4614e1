"""Builds the application from routes, middleware and error handlers."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import kvserve
from kvserve.server.http import anthropic_routes, info_routes, openai_routes
from kvserve.server.http.middleware import (
    ApiKeyMiddleware,
    BodyLimitMiddleware,
    MetricsMiddleware,
    RequestIdMiddleware,
    TurnstileMiddleware,
)
from kvserve.server.http.origins import OriginMiddleware
from kvserve.server.http.schemas import ERRORS
from kvserve.server.state.api_keys import ApiKeys
from kvserve.server.state.errors import install_handlers
from kvserve.server.state.server_state import ServerState
from kvserve.server.ui import routes as ui_routes

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})


def create_app(state: ServerState) -> FastAPI:
    """An ASGI application over ``state``; the caller starts the engine and marks it ready."""
    options = state.options
    app = FastAPI(
        title="kvserve",
        version=kvserve.__version__,
        docs_url=None,  # FastAPI's pages load from a CDN; ours are in `server/ui`
        redoc_url=None,
        openapi_url="/openapi.json" if options.docs else None,
        responses=ERRORS,
    )
    app.root_path = options.root_path
    app.state.server = state
    app.include_router(openai_routes.router)
    app.include_router(anthropic_routes.router)
    app.include_router(info_routes.router)
    app.include_router(info_routes.operations)
    app.include_router(ui_routes.make_router(state))
    install_handlers(app)
    # Middleware added last is outermost, so refusals carry the request id and CORS headers too.
    app.add_middleware(BodyLimitMiddleware, limit=options.max_body_bytes)
    if options.has_keys:
        keys = ApiKeys(options.api_keys, options.api_key_file)
        open_paths = OPEN_PATHS | ui_routes.page_files(options).keys()
        open_paths |= set() if options.guard_metrics else {"/metrics"}
        app.add_middleware(ApiKeyMiddleware, keys=keys, open_paths=open_paths)
    else:
        app.add_middleware(
            OriginMiddleware,
            hosts=options.allowed_hosts,
            origins=options.allowed_origins,
            open_paths=OPEN_PATHS | {"/metrics"},
        )
    if options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_credentials=options.allow_credentials,
            allow_methods=options.allowed_methods,
            allow_headers=options.allowed_headers,
            expose_headers=["X-Request-Id"],
        )
    app.add_middleware(TurnstileMiddleware)
    app.add_middleware(MetricsMiddleware, metrics=state.metrics)
    app.add_middleware(RequestIdMiddleware, state=state)
    return app
