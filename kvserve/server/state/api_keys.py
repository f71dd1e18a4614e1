"""Who sends a request: clients take turns. The keys that they must send are of ``--api-key``, and
of a file that is read as it changes."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from starlette.requests import Request

from kvserve.log import ConfigError, logger


class ApiKeys:
    """Keys by digest. A client is a number that its key keeps, whatever keys come and go.

    ``file`` has a key per line; empty lines and those that begin with ``#`` are none. Every request
    looks at its inode, time and size: a Kubernetes secret is replaced without a signal. A file that
    is gone, unreadable or empty changes nothing but the log. ``ConfigError`` if it is so at the
    start.
    """

    def __init__(self, given: Sequence[str], file: str | None) -> None:
        self._given = [_digest(key.encode()) for key in given]
        self._file = file
        self._numbers: dict[bytes, int] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._trouble = ""
        self._take([])
        try:
            if file is not None:
                self._read(file)
        except OSError as exc:
            raise ConfigError(f"--api-key-file: cannot read {file}: {exc.strerror}") from None
        except ValueError as exc:
            raise ConfigError(f"--api-key-file: {exc}") from None

    def client(self, key: bytes) -> int | None:
        """The number of the client that sends ``key``; ``None`` for a wrong one."""
        if self._file is not None:
            self._refresh(self._file)
        digest = _digest(key)
        # No early exit: the time must not reveal which key came close.
        found = [known for known in self._digests if secrets.compare_digest(digest, known)]
        return self._numbers[found[0]] if found else None

    def _refresh(self, file: str) -> None:
        try:
            if self._read(file):
                logger.info("--api-key-file: %s was read again", file)
            trouble = ""
        except (OSError, ValueError) as exc:
            trouble = str(exc)
        if trouble and trouble != self._trouble:
            logger.error("--api-key-file: the keys stay as they were: %s", trouble)
        self._trouble = trouble

    def _read(self, file: str) -> bool:
        """Take the keys of a file that is not as it was; whether it was another."""
        state = os.stat(file)
        stamp = state.st_ino, state.st_mtime_ns, state.st_size
        if stamp == self._stamp:
            return False
        lines = map(str.strip, Path(file).read_text("utf-8-sig").splitlines())
        keys = [line for line in lines if line and not line.startswith("#")]
        if not keys:
            raise ValueError(f"{file} has no key")
        self._take([_digest(key.encode()) for key in keys])
        self._stamp = stamp
        return True

    def _take(self, digests: list[bytes]) -> None:
        self._digests = [*self._given, *digests]
        for digest in self._digests:
            self._numbers.setdefault(digest, len(self._numbers))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


_NETWORK_BITS = 64
"""Of an IPv6 address: a client has all addresses of its network."""


def client_of(request: Request) -> str:
    """The same text for requests of one client: its API key's number, else its address.

    A header that nobody checks is not believed.
    """
    key: int | None = request.scope.get("state", {}).get("api_key")
    if key is not None:
        return f"key {key}"
    host = "" if request.client is None else request.client.host
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
