"""Who sent a request: clients take turns."""

from __future__ import annotations

import ipaddress

from starlette.requests import Request

_NETWORK_BITS = 64
"""Of an IPv6 address: a client has all addresses of its network."""


def client_of(request: Request) -> str:
    """The same text for requests of one client: its API key's number, else its address.

    A header that nobody checks is not believed.
    """
    key: int | None = request.scope.get("state", {}).get("api_key")
    if key is not None:
        return f"key {key}"
    return _network(request.client.host) if request.client is not None else ""


def _network(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.version == 4:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _NETWORK_BITS), strict=False))
