"""``python -m kvserve.server.cli.healthcheck``: the image's health check.

Asks the server that runs as process 1 for ``/health``, at the port and under the scheme that its
flags, the environment or its file name.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from kvserve.server.cli.serve import add_arguments
from kvserve.server.settings.args import Parser, UsageError
from kvserve.server.settings.reading import read_settings
from kvserve.server.settings.serve_settings import ServeSettings

_SECONDS = 4.0


def main(pid: str = "1") -> int:
    """0 if the server is healthy, else 1."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    try:
        settings = settings_of(words)
    except UsageError as error:
        print(error)
        return 1
    connection = _connect(settings)
    try:
        connection.request("GET", f"{settings.root_path}/health")
        return int(connection.getresponse().status != 200)
    except (OSError, http.client.HTTPException) as error:
        print(f"{settings.uds or settings.port}: {error}")
        return 1
    finally:
        connection.close()


def settings_of(words: Sequence[str]) -> ServeSettings:
    """The settings of a process with this command line; ``UsageError`` if it serves nothing."""
    named = [at for at, word in enumerate(words) if Path(word).name == "kvserve"]
    if not named:
        raise UsageError(f"this is no kvserve: {' '.join(words)[:200]}")
    flags = list(words[named[0] + 1 :])
    if flags[:1] == ["serve"]:
        flags = flags[1:]
    parser = Parser(prog="kvserve serve")
    add_arguments(parser)
    return read_settings(parser.parse(flags))[1]


def _connect(settings: ServeSettings) -> http.client.HTTPConnection:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    if settings.uds is not None:
        return _UnixConnection(settings.uds)
    if settings.ssl_certfile is None:
        return http.client.HTTPConnection(host, settings.port, timeout=_SECONDS)
    # The certificate is for the names that clients use, not for this address.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return http.client.HTTPSConnection(host, settings.port, timeout=_SECONDS, context=context)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(_SECONDS)
        self.sock.connect(self._path)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
