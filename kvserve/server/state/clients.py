"""Who sent a request."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from starlette.requests import Request

from kvserve.sampling_params import SamplingParams


def client_of(request: Request) -> str:
    """The same text for requests of one client: its API key's digest, else its address."""
    key = request.headers.get("authorization", "")
    if key:
        return hashlib.sha256(key.encode()).hexdigest()
    return request.client.host if request.client is not None else ""


def in_turn(params: SamplingParams, request: Request) -> SamplingParams:
    """``params`` with a grammar, if any, that waits behind those of its own client only."""
    wanted = params.structured_output
    if wanted is None:
        return params
    return replace(params, structured_outputs=replace(wanted, client=client_of(request)))
