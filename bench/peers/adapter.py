"""The peer's side: one JSON request per line on stdin, one JSON answer per line on stdout.

    {"load": {"model": "...", "dtype": "float32", "max_num_seqs": 64, "max_model_len": 128}}
    {"run": {"prompts": [[5, 6, 7]], "max_tokens": 64}}

are answered by `{"result": {...}}` or `{"error": "..."}`. Adapters run under a peer's interpreter,
so this file and the adapters import the standard library and that peer, and nothing of kvserve.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

Tokens = list[list[int]]


class Adapter(Protocol):
    """`load` is called first and returns versions. `run` continues every prompt greedily and
    returns the `seconds` of the whole call, its `cpu_seconds` where known, and the new `tokens`.
    `max_tokens` is one number; the adapters of kvserve and vLLM also take one for each prompt."""

    @property
    def load(self) -> Callable[..., dict[str, Any]]: ...

    @property
    def run(self) -> Callable[..., dict[str, Any]]: ...


def serve(adapter: Adapter) -> None:
    """Answer requests until stdin ends. Anything that a peer prints goes to stderr."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        ((name, settings),) = json.loads(line).items()
        call = {"load": adapter.load, "run": adapter.run}[name]
        try:
            answer: dict[str, Any] = {"result": call(**settings)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def limits(max_tokens: int | list[int], count: int) -> list[int]:
    """The limit of each of ``count`` prompts."""
    return max_tokens if isinstance(max_tokens, list) else [max_tokens] * count


class Stopwatch:
    """Measures time from its creation."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def seconds(self) -> dict[str, float]:
        """Wall time, and CPU time of all threads of this process."""
        cpu = time.process_time() - self._cpu
        return {"seconds": time.perf_counter() - self._wall, "cpu_seconds": cpu}


def versions(*packages: str) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}
