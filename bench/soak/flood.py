"""Sends a hundred thousand malformed requests, and drops a thousand streams.

`python -m bench.soak.flood --count 100000` writes JSON: deaths, 5xx, tokens of the fixed request,
memory before and after, and blocks afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.soak.malformed import malformed, raw
from bench.soak.served import Served, resident
from kvserve.benchmarks.reports.report import cpu_name, machine_facts

FLAGS = (
    *("--model", "kvserve/tiny", "--policy", "snapkv", "--policy.budget", "64"),
    *("--policy.window", "8", "--kv-layout", "head", "--max-model-len", "2048"),
    *("--max-num-seqs", "32", "--num-gpu-blocks-override", "12000"),
    *("--disable-uvicorn-access-log", "--read-timeout", "5", "--log-level", "warning"),
)
_WARM_UP = 300
_RAW_SHARE = 20


class Flood:
    """``count`` requests from ``clients`` at once, every twentieth of them raw bytes."""

    def __init__(self, count: int, streams: int, clients: int, seed: int) -> None:
        self._count, self._streams, self._clients, self._seed = count, streams, clients, seed
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.fixed_other = 0
        self.fixed_equal = 0
        self.dropped = 0

    async def run(self, served: Served) -> dict[str, Any]:
        expected = await asyncio.to_thread(served.fixed_tokens)
        async with httpx.AsyncClient(base_url=served.url, timeout=120) as http:
            # The first request of each kind allocates buffers, compiled grammars and caches of
            # libraries.
            await self._send(http, served, range(self._seed, self._seed + _WARM_UP))
            self.answers.clear()
            before = memory(served)
            started = time.monotonic()
            first = self._seed + _WARM_UP
            for start in range(first, first + self._count, 1000):
                await self._send(http, served, range(start, min(start + 1000, first + self._count)))
                found = await asyncio.to_thread(served.fixed_tokens)
                self.fixed_equal += found == expected
                self.fixed_other += found != expected
            seconds = time.monotonic() - started
            await self._drop_streams(http)
        idle = await asyncio.to_thread(served.idle, 120.0)
        await asyncio.sleep(6)  # the server closes incomplete requests meanwhile
        after = memory(served)
        tracebacks = served.text.count("Traceback")
        stats = await asyncio.to_thread(served.stats)
        alive = served.alive
        status = await asyncio.to_thread(served.stop)
        return {
            "requests": sum(self.answers.values()),
            "answers": dict(sorted(self.answers.items())),
            "seconds": round(seconds),
            "deaths": 0 if alive else 1,
            "5xx": sum(count for name, count in self.answers.items() if name.startswith("5")),
            "wrong": self.wrong[:50],
            "fixed_request_equal": self.fixed_equal,
            "fixed_request_other": self.fixed_other,
            "streams_dropped": self.dropped,
            "blocks_back": idle,
            "blocks": {k: stats[k] for k in ("blocks_total", "blocks_free", "blocks_cached")},
            "memory_mib_before": before,
            "memory_mib_after": after,
            "growth_mib": {part: round(after[part] - before[part], 1) for part in before},
            "tracebacks_in_the_log": tracebacks,
            "exit_status": status,
        }

    async def _send(self, http: httpx.AsyncClient, served: Served, seeds: range) -> None:
        waiting = iter(seeds)

        async def client() -> None:
            for seed in waiting:
                if seed % _RAW_SHARE == 0:
                    await self._raw(served, seed)
                else:
                    await self._one(http, seed)

        await asyncio.gather(*(client() for _ in range(self._clients)))

    async def _one(self, http: httpx.AsyncClient, seed: int) -> None:
        wrong = malformed(seed)
        headers = {"Content-Type": wrong.content_type}
        try:
            answer = await http.post(wrong.path, content=wrong.body, headers=headers)
        except httpx.HTTPError as error:
            self.answers[f"none ({type(error).__name__})"] += 1
            self.wrong.append(f"seed {seed}: {type(error).__name__} {error}")
            return
        self.answers[str(answer.status_code)] += 1
        if answer.status_code >= 500:
            self.wrong.append(f"seed {seed}: {answer.status_code} {answer.text[:300]}")

    async def _raw(self, served: Served, seed: int) -> None:
        self.answers[f"raw: {await asyncio.to_thread(answer_to, served.url, raw(seed))}"] += 1

    async def _drop_streams(self, http: httpx.AsyncClient) -> None:
        """Open streams, each of which is closed after its first line."""

        async def drop(index: int) -> None:
            body = {"prompt": "Hello " * 20, "max_tokens": 500, "ignore_eos": True}
            body |= {"stream": True, "seed": index}
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_lines():
                    break
            self.dropped += 1

        for start in range(0, self._streams, 50):
            await asyncio.gather(*(drop(i) for i in range(start, min(start + 50, self._streams))))


def answer_to(url: str, message: bytes) -> str:
    """The status of the server's answer to these bytes, or how the connection ended without one."""
    where = urlsplit(url)
    try:
        with socket.create_connection((where.hostname, where.port), timeout=10) as door:
            door.sendall(message)
            door.shutdown(socket.SHUT_WR)
            found = door.recv(4096)
    except OSError as error:
        return type(error).__name__
    return found.split(b" ")[1].decode("latin-1") if found.startswith(b"HTTP/1.1 ") else "closed"


def memory(served: Served) -> dict[str, float]:
    """Resident MiB of the server's process and of the engine's."""
    return {"server": resident(served.process.pid), "engine": resident(served.engine)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak.flood", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-result", type=Path)
    args = parser.parse_args()
    served = Served(FLAGS)
    served.start()
    flood = Flood(args.count, args.streams, args.clients, args.seed)
    found = asyncio.run(flood.run(served))
    facts = machine_facts("python -m bench.soak.flood", {"type": "cpu", "name": cpu_name()})
    about = {"benchmark": "flood", **facts, "rows": [found]}
    if args.save_result is not None:
        args.save_result.write_text(json.dumps(about, indent=1) + "\n")
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    good = not (found["5xx"] or found["deaths"] or found["fixed_request_other"])
    return 0 if good and found["blocks_back"] and max(found["growth_mib"].values()) < 50 else 1


if __name__ == "__main__":
    sys.exit(main())
