"""Clients that live in an environment of their own (``make acceptance`` makes it)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.real_server import Server

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-acceptance" / "bin" / "python"

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

RunClient = Callable[..., Any]


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    server = Server("--max-num-seqs", "32")
    yield server
    server.stop()


@pytest.fixture
def run_client() -> RunClient:
    """Run ``clients/NAME.py`` there; its standard output is JSON."""
    if not PYTHON.exists():
        pytest.skip("the clients are not installed; `make acceptance` installs them")

    def run(name: str, *arguments: str) -> Any:
        script = Path(__file__).parent / "clients" / f"{name}.py"
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
        done = subprocess.run(
            [str(PYTHON), str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=1200,
            env={**clean, **OFFLINE},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
