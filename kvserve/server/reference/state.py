"""A server that is configured but not started: enough to read its schema and metrics."""

from __future__ import annotations

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.options import server_options
from kvserve.server.state.server_state import ServerState


def idle_state() -> ServerState:
    """The state of a server with default settings, whose engine is never started."""
    config = EngineConfig()
    return ServerState(AsyncEngine(config), config, server_options(config, ServeSettings()))
