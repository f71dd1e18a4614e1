"""The notebooks of examples/ run from their first cell to their last, and store no outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def cells(notebook: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    return [cell for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_is_stored(notebook: Path) -> None:
    for cell in cells(notebook):
        assert cell["outputs"] == [] and cell["execution_count"] is None
        compile("".join(cell["source"]), notebook.name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook: Path) -> None:
    """Cells are plain Python, so no kernel is needed: they run in one process, in order."""
    program = "\n\n".join("".join(cell["source"]) for cell in cells(notebook))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=notebook.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=1450,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip()
