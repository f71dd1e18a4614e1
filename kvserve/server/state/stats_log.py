"""The log line of an engine's statistics."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

from kvserve.log import logger
from kvserve.server.state.engine_protocol import Engine
from kvserve.server.state.metrics import Metrics
from kvserve.stats import EngineStats

LOG_INTERVAL = 10.0


@dataclass
class StatsLog:
    """Logs a line of statistics at an interval, unless the engine is idle."""

    engine: Engine
    metrics: Metrics
    _last: EngineStats = field(default_factory=EngineStats)
    _time: float = 0.0
    _prefix: Counter[str] = field(default_factory=Counter)

    async def run(self, interval: float = LOG_INTERVAL) -> None:
        self._time = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            self.log()

    def log(self) -> None:
        new, old, now = self.engine.stats, self._last, time.monotonic()
        seconds = max(now - self._time, 1e-9)
        self._last, self._time = new, now
        total = self.metrics.prefix
        prefix, self._prefix = total - self._prefix, total
        prompt = new.prompt_tokens_total - old.prompt_tokens_total
        generated = new.generation_tokens_total - old.generation_tokens_total
        if not (prompt or generated or new.num_running or new.num_waiting):
            return
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, Running: %d, Waiting: %d, "
            "KV usage: %.1f%%, prefix hits: %.1f%%, tokens held/logical: %d/%d, "
            "blocks released: %d",
            prompt / seconds,
            generated / seconds,
            new.num_running,
            new.num_waiting,
            100 * new.kv_cache_usage,
            100 * prefix["hits"] / max(prefix["queries"], 1),
            new.tokens_held,
            new.tokens_logical,
            new.blocks_released_total - old.blocks_released_total,
        )
