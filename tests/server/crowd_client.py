"""500 streams at once, many of them given up half way; prints counts as JSON.

usage: crowd_client.py BASE_URL COUNT
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter

import httpx

base_url, count = sys.argv[1], int(sys.argv[2])


async def one(client: httpx.AsyncClient, index: int, seen: Counter[str]) -> None:
    rng = random.Random(index)
    leaves_after = rng.randint(0, 30) if rng.random() < 0.4 else None
    body = {
        "prompt": "Hello " * rng.randint(1, 60),
        "max_tokens": rng.randint(10, 60),
        "ignore_eos": True,
        "stream": True,
        "seed": index,
        "n": rng.choice((1, 1, 1, 2)),
    }
    lines = 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.status_code
        async for line in response.aiter_lines():
            lines += line.startswith("data: ")
            if leaves_after is not None and lines > leaves_after:
                seen["left"] += 1
                return
            if line == "data: [DONE]":
                seen["done"] += 1
            seen["errors"] += '"error"' in line


async def main() -> None:
    seen: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(base_url=base_url, limits=limits, timeout=240) as client:
        await asyncio.gather(*(one(client, index, seen) for index in range(count)))
    sys.stdout.write(json.dumps(seen) + "\n")


asyncio.run(main())
