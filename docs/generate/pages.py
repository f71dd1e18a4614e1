"""Every built page by its path under docs/."""

from __future__ import annotations

from bench.report.page import chapters
from docs.generate import (
    absent_names,
    architectures,
    command_line,
    compatibility,
    http_api,
    metrics,
    policies,
    python_api,
)
from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.server_state import ServerState


def all_pages() -> dict[str, str]:
    """The text of each page."""
    state = _idle_server()
    return {
        "policies.md": policies.page(),
        "compatibility.md": compatibility.page(),
        "reference/cli.md": command_line.page(),
        "reference/http.md": http_api.page(state),
        "reference/metrics.md": metrics.page(state),
        "reference/python.md": python_api.page(),
        "reference/absent.md": absent_names.page(),
        "reference/models.md": architectures.page(),
        **chapters(),
    }


def _idle_server() -> ServerState:
    """A server with default settings that is never started: it has a schema and metrics."""
    config = EngineConfig()
    return ServerState(AsyncEngine(config), config, ServeSettings())
