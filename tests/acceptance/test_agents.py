"""Tool loops of clients and agents' libraries against a real model, SmolLM2.

It is too small to call tools by itself: the first turn's grammar makes it. The second turn is its
own, after the results of its calls.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvserve.engine.models.fetched import fetch
from kvserve.log import ConfigError
from tests.acceptance.conftest import RunClient
from tests.server.real_server import Server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Server]:
    try:
        fetch("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    # Its own template writes no calls.
    server = Server(*("--model", "smollm2", "--max-model-len", "2048", "--chat-template", "hermes"))
    yield server
    server.stop()


def test_tool_loops(run_client: RunClient, smollm2: Server) -> None:
    found = run_client("agents_client", smollm2.url, "smollm2")
    assert len(found) == 12
    for name, both in found.items():
        for way, loop in both.items():
            assert "error" not in loop, f"{name}, {way}: {loop['error']}"
            assert loop["calls"] and loop["text"].strip(), (name, way, loop)
        assert both["streamed"] == both["whole"], name
