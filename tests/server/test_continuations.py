"""A conversation over HTTP that goes on from its compressed cache, and requests that do not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.real_server import Server


@pytest.fixture
def server(real_server: Server) -> Server:
    return real_server


def say(server: Server, prompt: list[int], **body: Any) -> tuple[list[int], dict[str, Any]]:
    """All tokens so far, and the usage."""
    settings = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.complete(prompt, **settings, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [*prompt, *found["choices"][0]["token_ids"]], found["usage"]


def test_a_second_turn_goes_on(server: Server) -> None:
    said, first = say(server, list(range(10, 60)))
    assert first["kv_cache_details"]["resumed_tokens"] == 0
    told, second = say(server, [*said, *range(20, 40)])
    details = second["kv_cache_details"]
    # All but the newest token of the first answer, whose entry was never computed.
    assert details["resumed_tokens"] == len(said) - 1
    assert second["prompt_tokens_details"]["cached_tokens"] == len(said) - 1
    assert details["compactions"] > first["kv_cache_details"]["compactions"] > 0
    assert details["held_tokens"] < details["logical_tokens"] == len(told) - 1
    stats = server.stats()["continuations"]
    assert stats["count"] and stats["blocks"]
    metrics = server.http.get("/metrics").text
    assert "kvserve:kv_resumed_total" in metrics and "kvserve:kv_continuations" in metrics
