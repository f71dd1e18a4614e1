"""The Python of the pages runs, and so do the requests to the server of `make run`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.docs.pages import ALL_FENCES, ROOT, SERVED, Fence
from tests.server.real_server import Server
from tests.waiting import WAIT

PYTHON = [fence for fence in ALL_FENCES if fence.language == "python"]
WHOLE = [f for f in PYTHON if "import" in f.body and f.mark != SERVED]
MODEL, POLICY = "kvserve/tiny-long", ("--policy", "kara")
POOL = ("--num-gpu-blocks-override", "600")


def at(fence: Fence) -> str:
    return f"{fence.page}:{fence.line}"


@pytest.mark.parametrize("fence", WHOLE, ids=at)
def test_programs_run(fence: Fence, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(fence.body, at(fence), "exec"), {"__name__": "__main__"})
    assert "compactions=" in capsys.readouterr().out


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server("--model", MODEL, *POLICY, *POOL)
    yield made
    made.stop()


def test_the_server_is_that_of_make_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert f"MODEL ?= {MODEL}\nPOLICY ?= {' '.join(POLICY)}\n" in makefile
    assert f"POOL ?= $(if $(filter kvserve/%,$(MODEL)),{' '.join(POOL)})\n" in makefile


@pytest.mark.slow
@pytest.mark.parametrize("fence", [f for f in ALL_FENCES if f.mark == SERVED], ids=at)
def test_what_asks_the_server_is_answered(fence: Fence, server: Server) -> None:
    if fence.language == "python":
        body = fence.body.replace("http://localhost:8000", server.url)
        done = run([sys.executable, "-c", body])
        assert "blocks_released" in done and "'policy': 'none'" in done
        return
    for words in fence.commands:
        if words[0] == "kvserve":
            words = [sys.executable, "-m", "kvserve", words[1], "--url", server.url, *words[2:]]
            done = run(words)
            shown = next(f for f in ALL_FENCES if f.page == fence.page and f.line > fence.line)
            assert shown.body.splitlines()[0].strip() in done
        else:
            done = run([word.replace("localhost:8000", server.url) for word in words])
            assert json.loads(done)["usage"]["kv_cache_details"]["blocks_released"] == 33


def run(words: list[str]) -> str:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_configurations_are_settings() -> None:
    """JSON in the pages can be read; dots that stand for more are not."""
    for fence in (f for f in ALL_FENCES if f.language == "json" and "..." not in f.body):
        json.loads(re.sub("…", "", fence.body))
