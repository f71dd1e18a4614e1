"""Libraries around the protocols of OpenAI and Anthropic understand the answers."""

from __future__ import annotations

import pytest

from tests.acceptance.conftest import RunClient
from tests.server.real_server import MODEL, Server

pytestmark = pytest.mark.slow
ANSWER = " Adam= Kevin7+ Rachel8, Adam5; answer Adam5"


def test_libraries(server: Server, run_client: RunClient) -> None:
    found = run_client("sdk_client", server.url, MODEL)
    assert found["litellm"]["text"] == found["litellm"]["streamed"] == ANSWER
    assert found["litellm"]["error"] == "ContextWindowExceededError"
    langchain = found["langchain"]
    assert langchain["text"] == langchain["streamed"] == ANSWER
    for point in (langchain["point"], *found["instructor"].values()):
        assert 0 <= point["x"] <= 9 and point["label"] in ("a", "b")
    agent = found["anthropic"]
    assert agent["tool"] == "point" and agent["counted"] and agent["text"] == ANSWER
    assert agent["reason"] == "tool_use"
