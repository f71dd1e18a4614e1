"""schemathesis over the published document: no 5xx, no hang, answers as they are described."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import run_tool
from tests.server.real_server import Server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance"
)


@pytest.fixture
def small_server() -> Iterator[Server]:
    server = Server("--max-model-len", "128")
    yield server
    server.stop()


def test_the_document_is_kept(small_server: Server, tmp_path: Path) -> None:
    run_tool(
        *("st", "run", f"{small_server.url}/openapi.json"),
        *("--checks", CHECKS, "--max-examples", "50", "--request-timeout", "20"),
        *("--seed", "1", "--phases", "examples,coverage,fuzzing"),
        cwd=tmp_path,
    )
    wait_until(small_server.idle)
    assert "Traceback" not in small_server.text
