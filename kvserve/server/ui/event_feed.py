"""``/v1/kv/events``: the pool and the running requests, a few times a second.

Each event is encoded once for all readers. Nothing is queued for a reader: a slow one skips events
and gets the newest. Without readers the engine makes no views of the pool and nothing is encoded.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import orjson

from kvserve.server.openai.responses import kv_stats
from kvserve.server.state.errors import too_many
from kvserve.server.state.server_state import ServerState
from kvserve.stats import EngineStats, PoolView, RequestStats

INTERVAL_S = 0.2
MOST_READERS = 64
"""Readers of one client: each wakes the event loop five times a second."""
_PATIENCE = 10
"""How often to look for a first view of the pool; replicas never have one."""
_FIELDS = tuple(item.name for item in fields(RequestStats))
_PING = b": ping\n\n"


class EventFeed:
    """The newest event, and how many readers each client has. Runs on one event loop."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._readers: Counter[str] = Counter()
        self._task: asyncio.Task[None] | None = None
        self._newest: tuple[int, bytes] = 0, b""

    def enter(self, client: str) -> None:
        """Add a reader; 429 if the client has too many. The first one starts the pool's views."""
        if self._readers[client] >= MOST_READERS:
            raise too_many(f"a client may read the events {MOST_READERS} times at once")
        self._readers[client] += 1
        if self._task is None:
            self._state.engine.watch_pool(True)
            self._task = asyncio.create_task(self._look())

    def leave(self, client: str) -> None:
        self._readers -= Counter((client,))
        if not self._readers and self._task is not None:
            self._task.cancel()
            self._task = None
            self._newest = self._newest[0], b""
            self._state.engine.watch_pool(False)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the newest event whenever the reader is ready for one, until the server ends."""
        told, quiet = -1, time.monotonic()
        state = self._state
        while not (state.draining or state.engine.dead_error is not None):
            number, event = self._newest
            if event and number != told:
                told, quiet = number, time.monotonic()
                yield event
            elif time.monotonic() - quiet > state.settings.ping_interval:
                quiet = time.monotonic()
                yield _PING
            await asyncio.sleep(INTERVAL_S)

    async def _look(self) -> None:
        """Encode each new view. Wait a moment for the first one of the pool; replicas have none."""
        seen: Any = None
        for _ in range(_PATIENCE):
            if self._state.engine.pool is None:
                await asyncio.sleep(INTERVAL_S / 4)
        while True:
            engine = self._state.engine
            now: Any = engine.pool or engine.stats
            if now is not seen and self._state.ready:
                seen = now
                self._newest = self._newest[0] + 1, encode_event(engine.stats, engine.pool)
            await asyncio.sleep(INTERVAL_S)


def encode_event(stats: EngineStats, pool: PoolView | None) -> bytes:
    """One event: ``kv_stats``, further totals, and the pool's cells if there is a view."""
    if pool is not None:
        stats = pool.stats
    body = {
        "time": time.time() if pool is None else pool.time,
        **kv_stats(stats, for_page=True),
        "cells": None,
    }
    if pool is not None:
        body["cells"] = {"blocks_per_cell": pool.blocks_per_cell, "runs": pool.cells}
        body["requests"] = [
            {**{name: getattr(request, name) for name in _FIELDS}, "log_blocks": blocks}
            for request, blocks in zip(stats.requests, pool.log_blocks, strict=True)
        ]
    return b"event: pool\ndata: %b\n\n" % orjson.dumps(body)
