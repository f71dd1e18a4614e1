"""A server in a process of its own, with the shipped model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.waiting import WAIT, wait_until

MODEL = "kvserve/tiny"


def start(*argv: str, code: str = "", **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own, or a program that stands for it."""
    return subprocess.Popen(
        [sys.executable, *(("-c", code) if code else ("-m", "kvserve")), *argv],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment},
    )


class Server:
    """A running server; its stderr is collected line by line."""

    def __init__(self, *argv: str, code: str = "", **environment: str) -> None:
        self.process = start("--model", MODEL, "--port", "0", *argv, code=code, **environment)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        lines = iter(self.process.stderr.readline, "")
        self._reader = threading.Thread(target=self.lines.extend, args=(lines,), daemon=True)
        self._reader.start()
        wait_until(lambda: "http://" in self.text or self.process.poll() is not None)
        match = re.search(r"http://\S+", self.text)
        assert match, self.text
        self.url = match[0]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT
        )

    @property
    def engine(self) -> int:
        """The engine's process id."""
        pid = self.process.pid
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        (engine,) = (child for child in below if b"core_process" in _command(child))
        return int(engine)

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def complete(self, prompt: Any = "Hello", **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": prompt, **body})

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self.http.get("/v1/kv/stats").json()
        return stats

    def idle(self) -> bool:
        stats = self.stats()
        back = stats["blocks_free"] + stats["blocks_cached"] == stats["blocks_total"]
        return back and not stats["requests"]

    def wait(self) -> int:
        """The exit status, once all is read that was said."""
        status = self.process.wait(WAIT)
        self._reader.join(WAIT)
        return status

    def stop(self) -> None:
        self.http.close()
        self.openai.close()
        self.process.kill()
        self.process.wait()


def _command(pid: str) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
