"""The address: who may reach it, and what is left of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvserve.server.cli.listening import listen, warn_if_open
from kvserve.server.settings.serve_settings import ServeSettings


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (ServeSettings(), False),
        (ServeSettings(host="0.0.0.0"), True),
        (ServeSettings(host="0.0.0.0", api_key=("secret",)), False),
        (ServeSettings(host="0.0.0.0", uds="/tmp/a"), False),
    ],
)
def test_an_open_door_is_named(
    settings: ServeSettings, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(settings)
    assert ("--api-key" in caplog.text) == warned


def test_a_sockets_file_goes_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an address has room for a hundred characters
    path = Path("socket")
    with listen(ServeSettings(uds=str(path))):
        assert path.exists()
    assert not path.exists()
