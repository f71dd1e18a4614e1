"""The Dockerfile by hadolint, and the chart's objects by Kubernetes' own schemas."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.conftest import PYTHON, ROOT
from tests.deploy.chart import render

pytestmark = pytest.mark.slow
EVERYTHING: dict[str, Any] = {
    "apiKey": {"secret": "keys"},
    "hubToken": {"secret": "hub"},
    "models": {"claim": "weights"},
    "ingress": {"enabled": True},
    "networkPolicy": {"enabled": True},
}


def _run(tool: str, *args: str) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        pytest.skip(f"{tool} is not installed; `make acceptance` installs it")
    command = [str(PYTHON.parent / tool), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_hadolint_finds_nothing() -> None:
    done = _run("hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", [{}, EVERYTHING], ids=["default", "everything"])
def test_the_chart_is_what_kubernetes_takes(values: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "chart.yaml"
    objects = render(**values)
    file.write_text(yaml.safe_dump_all(objects))
    done = _run("kubernetes-validate", "--strict", str(file))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert said.count("passed for resource") == len(objects), said
