"""The chart of deploy/helm as Helm makes it, whose SDK `make acceptance` installs."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm"
CLIENT = ROOT / "tests" / "acceptance" / "clients" / "helm_client.py"
PYTHON = ROOT / ".venv-acceptance" / "bin" / "python"


def render(**changes: Any) -> list[dict[str, Any]]:
    """All objects of the chart, with ``changes`` merged into its values."""
    return [
        item
        for name, text in texts(**changes).items()
        if name.endswith(".yaml") and (item := yaml.safe_load(text))
    ]


def texts(**changes: Any) -> dict[str, str]:
    """Rendered templates by file; where Helm is not installed, the test that asks is skipped."""
    python = os.environ.get("HELM_PYTHON", str(PYTHON))
    if not Path(python).exists():
        pytest.skip("Helm's SDK is not installed; `make acceptance` installs it")
    return _texts(python, json.dumps(changes, sort_keys=True))


@cache
def _texts(python: str, changes: str) -> dict[str, str]:
    command, sets = [python, str(CLIENT), str(CHART), "/dev/stdin"], f'{{"one": {changes}}}'
    done = subprocess.run(command, input=sets, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["sets"]["one"]
    if "error" in found:
        raise ValueError(found["error"])
    made: dict[str, str] = found["texts"]
    return made
