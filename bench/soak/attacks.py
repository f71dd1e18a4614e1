"""The attack matrix: what a bystander's stream and a plain request wait beside each attack.

``python -m bench.soak.attacks``; ``python -m bench.soak`` runs it too. Gaps are without the time
that other programs took (``bystander``), waits of plain requests as a client sees them. Attacks
come from another address, so the server knows that it has two clients.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.soak.bombs import grammar_bombs, long_prompts, scored_bombs
from bench.soak.bystander import Bystander
from bench.soak.fields import bodies
from bench.soak.malformed import malformed
from bench.soak.report import Check, write_attacks
from bench.soak.served import Served, resident

GAP, PLAIN = 0.5, 2.0
"""Seconds that a stream and a plain request may wait."""
CONTEXT = 4096
# A step is what everybody waits for, and 1024 tokens of long prompts take a third of a second of a
# core.
FLAGS = (
    *("--model", "kvserve/tiny", "--max-num-seqs", "64", "--num-gpu-blocks-override", "3000"),
    *("--policy", "kara", "--policy.window", "64", "--policy.buffer", "8", "--continuations", "on"),
    *("--write-timeout", "1.5", "--read-timeout", "3", "--max-num-batched-tokens", "1024"),
    *("--max-prefill-tokens", "256"),
    "--disable-uvicorn-access-log",
)
_CLIENTS = 8
_ADDRESS = "127.0.0.2"
"""Attacks come from there."""
_UNREAD = 100

Statuses = Iterator[int | str]
Attack = Callable[[str], Statuses]


def attacks(context: int) -> dict[str, Attack]:
    """By name, for a server of this context; each yields what became of its requests."""
    return {
        "grammars that are chains": lambda url: _completions(url, 3 * grammar_bombs()),
        "log-probabilities of prompts": lambda url: _completions(url, scored_bombs(context)),
        "streams that nobody reads": lambda url: _unread(url, context - 96),
        "continuations of short prompts": _continuations,
        "long texts to tokenize": _texts,
        "bodies at every limit": _large,
        "malformed bodies": _malformed,
        "half-sent requests": _half_sent,
        "long prompts": lambda url: _completions(
            url, [{"prompt": ids, "max_tokens": 8} for ids in long_prompts(12, 3 * context // 4, 3)]
        ),
        "streams that are cut": _cut,
    }


def run_attacks() -> list[dict[str, Any]]:
    """Run each beside a stream and plain requests; returns the rows of the matrix."""
    served = Served(FLAGS)
    served.start()
    rows = []
    try:
        for name, attack in {"nothing": _nothing, **attacks(CONTEXT)}.items():
            rows.append(_row(served, name, attack))
            sys.stderr.write(f"{json.dumps(rows[-1])}\n")
    finally:
        served.stop()
    return rows


def checks(rows: list[dict[str, Any]]) -> list[Check]:
    """The requirements on the matrix."""
    gap, plain = (max(row[name] for row in rows) for name in ("gap_s", "plain_s"))
    wrong = sum(row["failures"] for row in rows)
    return [
        Check("longest gap of a stream beside an attack, s", GAP, gap, "<="),
        Check("longest plain request beside an attack, s", PLAIN, plain, "<="),
        Check("5xx, broken streams and blocks that are not back beside attacks", 0, wrong, "=="),
    ]


def _row(served: Served, name: str, attack: Attack) -> dict[str, Any]:
    pids = served.process.pid, served.engine
    before, started = sum(map(resident, pids)), time.monotonic()
    with Bystander(served.url, pids) as other, _plain(served.url) as waits:
        answers = Counter(map(str, attack(served.url)))
        seconds = time.monotonic() - started
    back = served.idle(60.0)
    failed = [status for status in answers if status.startswith("5")]
    return {
        "attack": name,
        "seconds": round(seconds, 1),
        "answers": dict(sorted(answers.items())),
        "gap_s": round(other.longest_gap, 3),
        "gap_with_other_programs_s": round(other.longest_wait, 3),
        "plain_s": round(max(waits, default=0.0), 3),
        "growth_mib": round(sum(map(resident, pids)) - before, 1),
        "failures": len(other.failures) + len(failed) + (not back) + (not served.alive),
        "said": other.failures[:3],
    }


@contextmanager
def _plain(url: str) -> Iterator[list[float]]:
    """Plain requests one after the other while the context lasts; the list has their seconds."""
    over, waits = threading.Event(), []

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while not over.is_set():
                started = time.monotonic()
                body = {"prompt": "Hello", "max_tokens": 4, "kv_policy": "none"}
                assert http.post("/v1/completions", json=body).status_code == 200
                waits.append(time.monotonic() - started)
                over.wait(0.2)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield waits
    finally:
        over.set()
        thread.join(60)


# ---- the attacks --------------------------------------------------------------------------------


def _completions(url: str, bodies: list[dict[str, Any]]) -> Statuses:
    def send(body: dict[str, Any]) -> int:
        body = {"prompt": "a", "max_tokens": 8, **body}
        with _http(url) as http:
            return http.post("/v1/completions", json=body).status_code

    with ThreadPoolExecutor(_CLIENTS) as clients:
        yield from clients.map(send, bodies)


def _nothing(url: str) -> Statuses:
    time.sleep(4.0)
    return iter(())


def _unread(url: str, tokens: int) -> Statuses:
    """Their clients have next to no room for an answer, and wait for four seconds."""
    body = {"prompt": "a", "stream": True, "max_tokens": tokens, "logprobs": 20, "ignore_eos": True}
    made = [_socket(url, _request(body)) for _ in range(_UNREAD)]
    time.sleep(4.0)
    for each in made:
        each.close()
        yield "left"


def _continuations(url: str) -> Statuses:
    """Thousands of turns that share a first block, in bodies of 64."""
    first = [7] * 20
    for turn in range(40):
        prompts = [[*first, 3 + turn, 3 + i % 60, 3 + i // 60] for i in range(64)]
        yield from _completions(url, [{"prompt": prompts, "max_tokens": 1}])


def _texts(url: str) -> Statuses:
    text = "a b c, " * 30_000

    def send(path: str) -> int:
        with _http(url) as http:
            return http.post(path, json={"prompt": text}).status_code

    with ThreadPoolExecutor(_CLIENTS) as clients:
        yield from clients.map(send, ["/tokenize", "/v1/completions"] * 8)


def _large(url: str) -> Statuses:
    """Fields as large as they may be, one in twenty of them (``bench.soak.fields`` has all)."""
    with _http(url) as http:
        document = http.get("/openapi.json").json()
        for body in islice(bodies(document, 15 * 2**20), 0, None, 20):
            headers = {"Content-Type": "application/json"}
            yield http.post(body.path, content=body.text, headers=headers).status_code


def _malformed(url: str) -> Statuses:
    def send(seed: int) -> int:
        wrong = malformed(seed)
        headers = {"Content-Type": wrong.content_type}
        with _http(url) as http:
            return http.post(wrong.path, content=wrong.body, headers=headers).status_code

    with ThreadPoolExecutor(_CLIENTS) as clients:
        yield from clients.map(send, range(400))


def _half_sent(url: str) -> Statuses:
    """Heads and bodies that never end, until the server closes them."""
    made = [_socket(url, _request({"prompt": "a"})[: 20 + i % 100]) for i in range(200)]
    for each in made:
        each.settimeout(10)
        with suppress(OSError):
            yield each.recv(100)[9:12].decode() or "closed"
        each.close()


def _cut(url: str) -> Statuses:
    body = {"prompt": "a", "stream": True, "max_tokens": 500, "ignore_eos": True}

    def send(_: int) -> int:
        with _http(url) as http, http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
            return answer.status_code

    with ThreadPoolExecutor(_CLIENTS) as clients:
        yield from clients.map(send, range(200))


def _http(url: str) -> httpx.Client:
    limits = httpx.Limits(keepalive_expiry=2.0)  # the server closes idle connections after 5 s
    transport = httpx.HTTPTransport(local_address=_ADDRESS, limits=limits)
    return httpx.Client(base_url=url, transport=transport, timeout=120)


def _request(body: dict[str, Any]) -> bytes:
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}"
    return f"{head}\r\nContent-Type: application/json\r\n\r\n{text}".encode()


def _socket(url: str, sent: bytes) -> socket.socket:
    where = urlsplit(url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.bind((_ADDRESS, 0))
    made.connect((str(where.hostname), int(where.port or 80)))
    made.sendall(sent)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak.attacks", description=__doc__)
    parser.add_argument("--save-result", type=Path, help="JSON file")
    args = parser.parse_args()
    rows = run_attacks()
    found = checks(rows)
    write_attacks(rows, found, args.save_result)
    return 0 if all(check.holds for check in found) else 1


if __name__ == "__main__":
    sys.exit(main())
