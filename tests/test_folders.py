"""Where files go that nobody asked for."""

from __future__ import annotations

import tempfile

import pytest

from kvserve.folders import temporary_folder


def test_a_full_disk_has_room_for_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    assert temporary_folder() == tempfile.gettempdir()
    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert temporary_folder() == "/somewhere"
    monkeypatch.delenv("TMPDIR")
    assert temporary_folder() == "/tmp"
