"""Where the server listens: nobody else's file or port is taken, and only its own file goes."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from kvserve.log import ConfigError
from kvserve.server.cli.listening import listen
from kvserve.server.settings.serve_settings import ServeSettings


def at(path: Path) -> ServeSettings:
    return ServeSettings(uds=str(path))


def bound(path: Path, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    return made


@pytest.mark.parametrize("kind", ["file", "folder", "pipe", "link", "link to a socket"])
def test_what_is_no_socket_stays(tmp_path: Path, kind: str) -> None:
    """A file of this name was deleted without a word."""
    path, other = tmp_path / "a", tmp_path / "b"
    if kind == "file":
        path.write_text("data")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        other.write_text("data") if kind == "link" else bound(other).close()
        path.symlink_to(other)
    before = os.lstat(path), sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"--uds.*is no socket"), listen(at(path)):
        pass
    assert (os.lstat(path), sorted(tmp_path.iterdir())) == before


def test_a_socket_that_nobody_listens_on_is_taken(tmp_path: Path) -> None:
    bound(tmp_path / "a").close()
    with listen(at(tmp_path / "a")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_is_in_use_stays(tmp_path: Path, kind: socket.SocketKind) -> None:
    with bound(tmp_path / "a", kind) as used:
        if kind is socket.SOCK_STREAM:
            used.listen()
        with pytest.raises(ConfigError, match="in use; change --uds"), listen(at(tmp_path / "a")):
            pass
        assert (tmp_path / "a").exists()


def test_only_its_own_file_goes(tmp_path: Path) -> None:
    with listen(at(tmp_path / "a")):
        (tmp_path / "a").unlink()
        (tmp_path / "a").write_text("somebody else's")
    assert (tmp_path / "a").read_text() == "somebody else's"


def test_who_is_second_is_told_at_once() -> None:
    """Both had bound the port before one listened: the other one loaded its model first."""
    with listen(ServeSettings(port=0)) as first, pytest.raises(ConfigError) as refused:
        port = first.getsockname()[1]
        with listen(ServeSettings(port=port)):
            pass
    assert f"127.0.0.1:{port}: Address already in use" in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"uds": "/tmp/" + "a" * 200},
        {"uds": "/nowhere/at/all"},
        {"host": "a" * 70, "port": 0},
        {"host": "a..b", "port": 0},
        {"host": "203.0.113.9", "port": 0},
        {"host": "no such host", "port": 0},
        {"host": "1:2", "port": 0},
        {"host": "\udce9", "port": 0},
    ],
)
def test_an_address_that_cannot_be_is_a_line(settings: dict[str, Any]) -> None:
    served = ServeSettings(**settings)
    with (
        pytest.raises(ConfigError, match=r"cannot listen on .*change --") as refused,
        listen(served),
    ):
        pass
    assert "None" not in str(refused.value)


@pytest.mark.parametrize("uds", ["", "/tmp/a\0b", "\0abstract"])
def test_a_socket_has_a_name(uds: str) -> None:
    """The system cuts what follows a zero byte, and takes any name for none."""
    with pytest.raises(ConfigError, match="--uds"):
        ServeSettings(uds=uds)
