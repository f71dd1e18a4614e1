"""Clients that live in an environment of their own (``make acceptance`` makes it).

What could not be installed, since no package index was reached, skips its tests with a line.
"""

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


def tool(name: str) -> str:
    """The path of a program there, or a skipped test."""
    places = (PYTHON.parent / name, PYTHON.parents[1] / "prometheus" / "usr" / "bin" / name)
    for place in places:
        if place.exists():
            return str(place)
    pytest.skip(f"{name} is not installed; `make acceptance` installs it")


def run_tool(
    name: str, *arguments: str, cwd: Path = ROOT, timeout: float = 280
) -> subprocess.CompletedProcess[str]:
    """Run a program there, offline and without this environment's packages; it must end well."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        [tool(name), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**clean, **OFFLINE},
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="session")
def run_client() -> RunClient:
    """Run ``clients/NAME.py`` there; its standard output is JSON."""
    if not (PYTHON.parents[1] / ".installed").exists():
        pytest.skip("the clients are not installed; `make acceptance` installs them")

    def run(name: str, *arguments: str) -> Any:
        script = Path(__file__).parent / "clients" / f"{name}.py"
        done = run_tool("python", str(script), *arguments, timeout=1200)
        return json.loads(done.stdout.splitlines()[-1])

    return run
