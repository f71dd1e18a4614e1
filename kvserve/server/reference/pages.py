"""Generate the reference pages: command line, HTTP API, messages, metrics and Python."""

from __future__ import annotations

from kvserve.server.reference import command_line, http_api, messages, metrics, python_api
from kvserve.server.reference.state import idle_state


def all_pages() -> dict[str, str]:
    """The text of each page by its file's name. Loads no model and opens no port."""
    state = idle_state()
    return {
        "cli.md": command_line.page(),
        "http.md": http_api.page(state),
        "messages.md": messages.page(),
        "metrics.md": metrics.page(state),
        "python.md": python_api.page(),
    }
