"""Kind starts and ends: something is said at once, flags are read before a model is, and whoever
is told to stop while it loads stops."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvserve.config import EngineConfig
from kvserve.engine.runner import memory
from kvserve.log import ConfigError
from kvserve.server.cli.listening import warn_if_open
from kvserve.server.settings.serve_settings import ServeSettings
from tests.server.real_server import MODEL, Server, start
from tests.waiting import WAIT

SMALL = ("--num-gpu-blocks-override", "200")


def test_the_first_line_comes_before_anything_is_loaded() -> None:
    """Before torch, which takes seconds: the modules that are loaded by then say so."""
    code = (
        "import logging, sys\n"
        "class Look(logging.Handler):\n"
        "    def emit(self, record):\n"
        "        print(record.getMessage(), 'torch' in sys.modules, 'fastapi' in sys.modules)\n"
        "        sys.stdout.flush(); import os; os._exit(0)\n"
        "logging.getLogger('kvserve').addHandler(Look())\n"
        "from kvserve.server.cli.commands import main\n"
        "main(['--model', 'kvserve/tiny', '--port', '0'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT
    )
    assert re.match(r"kvserve \S+ starts with kvserve/tiny .*False False", done.stdout), done


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"kv_cache_memory": 2**40}, "--kv-cache-memory"),
        ({"num_gpu_blocks_override": 2**30}, "--num-gpu-blocks-override"),
        ({"kv_cache_memory": 2**33, "tensor_parallel_size": 4}, "--kv-cache-memory"),
    ],
)
def test_a_pool_beyond_the_memory_is_refused(settings: dict[str, Any], flag: str) -> None:
    """The system gives any address; the process dies once it writes there."""
    config = EngineConfig.from_flat(**settings)
    with pytest.raises(ConfigError, match=f"{flag}.*GiB"):
        memory.check_pool(config.cache, 16384, 24 * 2**30, config.parallel.tensor_parallel_size)
    memory.check_pool(EngineConfig.from_flat(kv_cache_memory=2**30).cache, 16384, 24 * 2**30)


def test_the_memory_of_a_container_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("2147483648\n")
    (tmp_path / "memory.current").write_text("147483648\n")
    assert memory._left_in_group(tmp_path) == 2_000_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._left_in_group(tmp_path) > 2**60


# ---- the real command ---------------------------------------------------------------------------


@pytest.mark.slow
def test_it_starts_and_says_that_it_compiles(tmp_path: Path) -> None:
    assert shutil.which("g++"), "the machine of the tests has a compiler"
    server = Server(*SMALL, XDG_CACHE_HOME=str(tmp_path / "cache"))
    try:
        said = r"compiling linear.cpp with g\+\+ into \S*cache/kvserve, once"
        assert re.search(said, server.text), server.text
        assert server.complete(max_tokens=3).status_code == 200
    finally:
        server.stop()


@pytest.mark.slow
def test_sigterm_while_it_compiles_leaves_nothing(tmp_path: Path) -> None:
    """No process, no unfinished file."""
    process = start("--model", MODEL, "--port", "0", *SMALL, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert process.stderr is not None
    for line in process.stderr:
        if "compiling" in line:
            break
    process.terminate()
    assert process.wait(WAIT) == 0
    left = list((tmp_path / "cache" / "kvserve").iterdir())
    assert all(re.fullmatch(r"\w+-[0-9a-f]{16}\.so", file.name) for file in left), left
    mine = str(tmp_path).encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                assert mine not in (folder / "cmdline").read_bytes()
            except OSError:
                continue


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (ServeSettings(), False),
        (ServeSettings(host="0.0.0.0"), True),
        (ServeSettings(host="0.0.0.0", api_key=("secret",)), False),
        (ServeSettings(host="0.0.0.0", uds="/tmp/a"), False),
    ],
)
def test_an_open_door_is_named(
    settings: ServeSettings, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_open(settings)
    assert ("--api-key" in caplog.text) == warned


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")
def test_what_is_said_to_a_full_disk_ends_nothing() -> None:
    """The start-up table and errors go to stderr; a server must not end over them."""
    code = "from kvserve.log import say; say('a table\\n'); print('goes on')"
    with FULL.open("wb") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, check=False
        )
    assert (ended.returncode, ended.stdout) == (0, b"goes on\n")
