"""``python -m kvserve.server.cli.healthcheck``: the image's health check.

Asks the server that runs as process 1 for ``/health``, at the port and under the scheme that its
flags, the environment or its file name, and reads the whole answer.
"""

from __future__ import annotations

import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

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
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    scheme = "http" if settings.ssl_certfile is None else "https"
    url = httpx.URL(
        scheme=scheme, host=host, port=settings.port, path=f"{settings.root_path}/health"
    )
    try:
        transport = httpx.HTTPTransport(uds=settings.uds, verify=_tls(settings))
        with httpx.Client(transport=transport, timeout=_SECONDS) as client:
            answer = client.get(url)
            return int(answer.status_code != 200 or answer.json() != {"status": "ok"})
    except (httpx.HTTPError, OSError, ValueError) as error:
        print(f"{settings.uds or settings.port}: {error}")
        return 1


def _tls(settings: ServeSettings) -> ssl.SSLContext:
    """Believes any certificate, since it is for the names that clients use, not for this address.
    Shows the server's own where it asks clients for theirs."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if settings.ssl_certfile is not None and settings.ssl_ca_certs is not None:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    return context


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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
