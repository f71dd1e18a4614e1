"""Requests that once ended the server, filled its memory or made others wait, beside a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engine.sampling.test_grammar_trial import CHAINS, nested, references
from tests.server.bystander import Bystander
from tests.server.conftest import wait_until
from tests.server.real_server import Server

GAP = 0.5
"""Seconds that a stream may wait beside an attack, on a machine that does nothing else."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("--max-num-seqs", "64", "--num-gpu-blocks-override", "3000")
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _the_server_is_well(server: Server) -> Iterator[None]:
    yield
    assert server.process.poll() is None, server.text
    wait_until(server.idle, 20)
    assert "Traceback" not in server.text, server.text


def test_grammars_that_overflow_a_stack(server: Server) -> None:
    """Ten of ten ended the server."""
    bombs: list[dict[str, Any]] = [
        {"guided_json": references(1000)},
        {"guided_json": references(120)},
        {"response_format": _format(nested(80, "anyOf"))},
        {"response_format": _format(nested(80, "allOf"))},
        *({"structured_outputs": {"grammar": chain}} for chain in CHAINS.values()),
    ]
    server.complete(max_tokens=2, guided_choice=["a", "b"])  # starts the helper
    with Bystander(server.url) as other, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda bomb: server.complete(**bomb), bombs * 3))
        started = time.monotonic()
        assert server.complete(max_tokens=2, guided_choice=["yes", "no"]).status_code == 200
        assert time.monotonic() - started < 2
    for answer, bomb in zip(answers, bombs * 3, strict=True):
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == next(iter(bomb))
    assert sum(answer.status_code == 400 for answer in answers) >= 3 * len(CHAINS)
    assert not other.failures and other.longest_gap < GAP, other.longest_gap


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
