"""Where files go that nobody asked for."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

import pytest

import kvserve
from kvserve.folders import install, scratch_folder, temporary_folder

SOURCE = Path(kvserve.__file__).parent


def test_a_full_disk_has_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    assert temporary_folder() == tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert temporary_folder() == "/somewhere"
    monkeypatch.delenv("TMPDIR")
    assert temporary_folder() == "/tmp"


def test_an_extra_is_installed_from_the_clone() -> None:
    assert install("otel") == f"{sys.executable} -m pip install -e '{SOURCE.parent}[otel]'"


def test_no_message_sends_anybody_to_an_index_that_lacks_kvserve() -> None:
    installed = *SOURCE.rglob("*.py"), *(SOURCE.parent / "bench/harness").rglob("*.py")
    texts = {path: path.read_text() for path in installed}
    assert [path for path, text in texts.items() if "pip install 'kvserve" in text] == []
    named = {name for text in texts.values() for name in re.findall(r"install\('([\w-]+)'\)", text)}
    extras = (SOURCE.parent / "pyproject.toml").read_text()
    assert {"otel", "ray", "bench", "cuda"} <= named
    assert [name for name in named if f"\n{name} = [" not in extras] == []


def test_a_folder_has_room_for_the_name_of_a_socket(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The library of messages refused it with a traceback, and the folder stayed."""
    deep = tmp_path / ("a" * 110)
    deep.mkdir()
    for folder, socket, named in (
        (deep, "out", r"TMPDIR is too long: the name of a socket has at most 103"),
        (tmp_path / "none", "", "No such file"),
    ):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(OSError, match=named):
            scratch_folder(socket)
    assert not [*deep.iterdir()]
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with scratch_folder() as made:
        assert Path(made).parent == deep
    assert not [*deep.iterdir()]
