"""A server that has been configured and not started: enough to ask it for its schema."""

from __future__ import annotations

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.options import server_options
from kvserve.server.state.server_state import ServerState


def idle_state() -> ServerState:
    """Default settings, one engine that is never started."""
    config = EngineConfig()
    return ServerState(AsyncEngine(config), config, server_options(config, ServeSettings()))
