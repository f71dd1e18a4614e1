"""Libraries around OpenAI's protocol understand structured output and errors."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import RunClient
from tests.server.real_server import MODEL, Server

pytestmark = pytest.mark.slow


def test_libraries(server: Server, run_client: RunClient) -> None:
    found = run_client("sdk_client", server.url, MODEL)
    assert len(found["points"]) == 3 and found["refused"] == "ContextWindowExceededError"
    for point in found["points"]:
        assert 0 <= point["x"] <= 9 and point["label"] in ("a", "b")
