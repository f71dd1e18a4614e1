"""The address at which the server listens."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvserve.log import ConfigError, logger
from kvserve.server.settings.serve_settings import ServeSettings

_BACKLOG = 2048


@contextmanager
def listen(settings: ServeSettings) -> Iterator[socket.socket]:
    """A listening socket, or ``ConfigError``. The file of a Unix socket goes with it."""
    host, port = settings.host, settings.port
    address: Any = (host, port)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    where, flags = f"{host}:{port}", "--host or --port"
    if settings.uds is not None:
        address, family, where, flags = settings.uds, socket.AF_UNIX, settings.uds, "--uds"
        _remove_stale(settings.uds)
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        # Only who listens has the port: several may bind it.
        listener.listen(_BACKLOG)
    except (OSError, ValueError, TypeError) as exc:  # the latter for what cannot be a host's name
        listener.close()
        why = (isinstance(exc, OSError) and exc.strerror) or exc
        raise ConfigError(f"cannot listen on {where}: {why}; change {flags}") from None
    made = None if settings.uds is None else _identity(settings.uds)
    with listener:
        try:
            yield listener
        finally:
            if settings.uds is not None and _identity(settings.uds) == made:
                Path(settings.uds).unlink(missing_ok=True)


def _identity(path: str) -> tuple[int, int] | None:
    """Which file has this name."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _remove_stale(path: str) -> None:
    """Remove a socket that a dead server left behind. One that answers stays, and what is no socket
    is refused: it may be somebody's data."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return  # it is not there, or ``bind`` says why it cannot be
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"--uds: {path} is there and is no socket; name another file")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            return


def warn_if_open(settings: ServeSettings) -> None:
    """Say so if anybody who reaches this machine may use the server."""
    local = settings.uds is not None or settings.host in ("127.0.0.1", "::1", "localhost")
    if not (local or settings.api_key or settings.api_key_file):
        logger.warning(
            "anybody who reaches %s may use this server: it has no keys (--api-key, "
            "KVSERVE_API_KEY, --api-key-file)",
            settings.host,
        )


def address_of(settings: ServeSettings, listener: socket.socket) -> str:
    """The URL at which clients reach the server."""
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_keyfile is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
