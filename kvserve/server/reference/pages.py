"""Every generated page by its file's name."""

from __future__ import annotations

from kvserve.server.reference import command_line, http_api, messages, metrics, python_api
from kvserve.server.reference.state import idle_state


def all_pages() -> dict[str, str]:
    """The pages; no model is loaded and nothing listens."""
    state = idle_state()
    return {
        "cli.md": command_line.page(),
        "http.md": http_api.page(state),
        "messages.md": messages.page(),
        "metrics.md": metrics.page(state),
        "python.md": python_api.page(),
    }
