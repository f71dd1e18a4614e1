"""A crowd of streams with random disconnects: blocks come back, and the event loop stays free."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.cli.runner import freeze_heap
from kvserve.server.http.app import create_app
from kvserve.server.state.server_state import ServerOptions, ServerState
from tests.server.real_server import MODEL

CLIENT = Path(__file__).with_name("crowd_client.py")


class LoopWatch:
    """The most that one turn of the running event loop computed.

    CPU time of its thread, not wall time: on a shared machine the latter says how busy others are.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        loop: Any = asyncio.get_running_loop()
        turn = loop._run_once

        def timed_turn() -> None:
            started = time.thread_time()
            turn()
            self.longest = max(self.longest, time.thread_time() - started)

        loop._run_once = timed_turn


@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.slow)])
async def test_a_crowd_comes_and_goes(count: int) -> None:
    config = EngineConfig.from_flat(model=MODEL, max_num_seqs=64, max_model_len=512)
    engine = AsyncEngine(config)
    await engine.start()
    state = ServerState(engine, config, ServerOptions(served_names=(MODEL,)))
    state.mark_ready()
    freeze_heap()
    server = uvicorn.Server(
        uvicorn.Config(create_app(state), port=0, log_level="error", lifespan="off")
    )
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        client = await asyncio.create_subprocess_exec(
            sys.executable, str(CLIENT), url, str(count), stdout=asyncio.subprocess.PIPE
        )
        watch = LoopWatch()
        out, _ = await client.communicate()
        seen = json.loads(out)
        assert seen["done"] + seen["left"] == count
        assert seen["left"] > count / 10 and not seen["errors"]
        for _ in range(100):
            stats = engine.stats
            if not stats.num_running and stats.kv_cache_usage == 0.0 and not state.generations:
                break
            await asyncio.sleep(0.02)
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
        sys.stderr.write(f"longest turn of the event loop: {1000 * watch.longest:.1f} ms\n")
        assert watch.longest < 0.05
    finally:
        server.should_exit = True
        await serving
        await engine.shutdown()
