"""Progress without a terminal: lines of the log, and none about what is quick."""

from __future__ import annotations

import logging

import pytest

from kvserve import progress


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, 3), (3600.0, 0)])
def test_lines_of_the_log(
    seconds: float, lines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "_SECONDS", seconds)
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)
    with caplog.at_level(logging.INFO, "kvserve"):
        bar = progress.progress([5, 6, 7], desc="Loading", unit="tensor", miniters=1)
        assert list(bar) == [5, 6, 7]
    found = [line for line in caplog.messages if line.startswith("Loading: ")]
    assert len(found) >= lines and bool(found) == bool(lines)
    if lines:
        assert found[-1].startswith("Loading: 3 of 3 tensors, 00:00 so far")
        assert not any("\r" in line for line in found)


def test_lines_without_a_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`kvserve bench` and `eval` configure no log, and take the longest."""
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    monkeypatch.setattr(progress.logger, "level", logging.WARNING)
    progress.logger.manager._clear_cache()  # type: ignore[attr-defined]
    assert list(progress.progress([5, 6], desc="none", unit="run", miniters=1)) == [5, 6]
    lines = capsys.readouterr().err.splitlines()
    assert lines and lines[-1].startswith("none: 2 of 2 runs") and "\r" not in "".join(lines)


def test_hidden_progress_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvserve"):
        assert list(progress.progress([1], hidden=True)) == [1]
    assert not caplog.messages
