"""A crowd of streams with random disconnects: blocks come back."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
import uvicorn

from kvserve.config import EngineConfig
from kvserve.engine.frontend.async_engine import AsyncEngine
from kvserve.server.cli.runner import freeze_heap
from kvserve.server.http.app import create_app
from kvserve.server.settings.serve_settings import ServeSettings
from kvserve.server.state.server_state import ServerState
from tests.server.real_server import MODEL
from tests.waiting import until

CLIENT = Path(__file__).with_name("crowd_client.py")


@pytest.mark.parametrize("count", [40, 500])
@pytest.mark.slow
async def test_a_crowd_comes_and_goes(count: int) -> None:
    config = EngineConfig.from_flat(model=MODEL, max_num_seqs=64, max_model_len=512)
    engine = AsyncEngine(config)
    await engine.start()
    state = ServerState(engine, config, ServeSettings(served_model_name=(MODEL,)))
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
        out, _ = await client.communicate()
        seen = json.loads(out)
        assert seen["done"] + seen["left"] == count
        assert seen["left"] > count / 10 and not seen["errors"]
        await until(lambda: not (engine.stats.kv_cache_usage or state.generations))
        await until(lambda: engine.stats.num_running == 0)
        assert engine.stats.num_waiting == 0
    finally:
        server.should_exit = True
        await serving
        await engine.shutdown()
