"""`make docs-site`: the strict build passes, and its pages load nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.waiting import WAIT

_LOADED = re.compile(r"<(?:script|img|iframe|link)[^>]*?(?:src|href)=\"?(https?://[^\"\s>]+)", re.I)
_CANONICAL = re.compile(r'<link[^>]*rel="?(?:canonical|edit|prev|next)')


@pytest.mark.slow
def test_the_strict_build_passes_and_is_offline(tmp_path: Path) -> None:
    local = ROOT / ".venv-docs" / "bin" / "mkdocs"
    mkdocs = os.environ.get("MKDOCS") or (str(local) if local.exists() else shutil.which("mkdocs"))
    if mkdocs is None:
        pytest.skip("mkdocs is not installed: make docs-site installs it")
    subprocess.run([sys.executable, "-m", "docs.generate", "build/pages"], cwd=ROOT, check=True)
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        tags = [t for t in re.findall(r"<[^>]+>", page.read_text()) if not _CANONICAL.match(t)]
        assert _LOADED.findall("".join(tags)) == [], page.name
