"""What a client sends may hurt nobody else: bounds, refusals and time-outs.

A real server with the shipped model. After everything the fixed request has the same tokens, and
some of it comes beside a stream. What it costs in seconds and memory, and how long others wait, is
measured by `python -m bench.soak.attacks`, alone on a machine.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from bench.soak.bombs import CHAINS, grammar_bombs
from bench.soak.bystander import Bystander
from tests.server.conftest import payloads, sent
from tests.server.real_server import Server
from tests.thinning import slow
from tests.waiting import WAIT, wait_until

CORPUS = [
    json.loads(line)
    for line in Path(__file__).with_name("corpus.jsonl").read_text().splitlines()
    if line
]
FIXED = {"prompt": "Hello there", "max_tokens": 24, "temperature": 0, "return_token_ids": True}


@pytest.fixture
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(scope="module")
def fixed() -> list[list[int]]:
    """What the fixed request was answered the first time."""
    return []


@pytest.fixture(autouse=True)
def _others_are_well(server: Server, fixed: list[list[int]]) -> Iterator[None]:
    fixed.extend([tokens_of(server)] if not fixed else [])
    yield
    assert server.process.poll() is None, server.text
    assert tokens_of(server) == fixed[0]
    wait_until(server.idle)
    assert "Traceback" not in server.text, server.text


def tokens_of(server: Server) -> list[int]:
    answer = server.complete(**FIXED)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def refused(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 400, (answer.status_code, answer.text)
    assert answer.headers["X-Request-Id"]
    error: dict[str, Any] = answer.json()["error"]
    assert not re.search(r"panick|\.rs:|Traceback|unwrap", error["message"]), error
    return error


@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case["why"])
def test_what_broke_something_once_is_refused(server: Server, case: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json"}
    error = refused(server.http.post(case["path"], content=case["body"], headers=headers))
    assert str(error["param"]).startswith(case.get("param", ""))
    assert case.get("says", "") in str(error)


def test_a_body_of_ten_thousand_levels(server: Server) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in (300, 900, 10_000):
            nested = opening * depth + "1" + closing * depth
            for field in ("kv_policy", "metadata", "response_format", "what"):
                body = f'{{"prompt": "a", "max_tokens": 1, "{field}": {nested}}}'
                headers = {"Content-Type": "application/json"}
                refused(server.http.post("/v1/completions", content=body, headers=headers))


def test_many_wrong_values_cost_no_more_than_one(server: Server) -> None:
    """A list of a million wrong items once meant a million errors."""
    for field in ("stop_token_ids", "allowed_token_ids", "bad_words", "stop", "guided_choice"):
        wrong: list[Any] = [{}] * 1_000_000
        assert len(str(refused(server.complete("a", **{field: wrong})))) < 1000
    refused(server.complete("a", logit_bias={str(i): "x" for i in range(300_000)}))
    refused(server.http.post("/v1/chat/completions", json={"messages": [{}] * 1_000_000}))


def test_grammars_that_explode(server: Server) -> None:
    """Some left 644 MiB in the engine. What is given back: sampling/test_grammar.py."""
    bombs = [
        {"regex": "(a{999}){999}"},
        {"choice": [f"option number {i}" for i in range(10_000)]},
        {"json": {"enum": [f"v{i}" for i in range(9_000)]}},
        {"json": {"properties": {f"p{i}": {"pattern": f"^.{{{i}}}$"} for i in range(900)}}},
        {"grammar": "start: " + "(" * 400 + '"a"' + ")" * 400},
        {"regex": "(.*a){20}(.*b){20}.{2000}"},
    ]
    for bomb in bombs:
        answer = server.complete("a", max_tokens=4, structured_outputs=bomb)
        assert answer.status_code in (200, 400), answer.text
        assert not re.search(r"panick|\.rs:", answer.text)
    error = refused(server.complete("a", guided_choice=[f"option {i}" for i in range(100_000)]))
    assert "10000" in error["message"]
    refused(server.complete("a", structured_outputs={"regex": "a" * 2_000_000}))


def test_half_sent_requests_end(server: Server) -> None:
    """600 of them stayed open."""
    halves = [
        b"",
        b"POST /v1/comp",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n"
        b'Content-Type: application/json\r\n\r\n{"prompt"',
        b"\r\n",
    ]
    sockets = [connect(server) for _ in range(50)]
    for i, each in enumerate(sockets):
        each.sendall(halves[i % len(halves)])
    assert server.http.get("/health").status_code == 200
    ends = [answer_of(each) for each in sockets]
    assert all(end is not None for end in ends)
    assert any(b"408" in (end or b"") for end in ends)


def test_a_body_that_drips_ends(server: Server) -> None:
    drip = connect(server)
    drip.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"
        b"Content-Type: application/json\r\n\r\n"
    )
    with pytest.raises(OSError):
        for _ in range(999):  # the whole body would take 50 s, and the time-out is 5
            drip.sendall(b" ")
            time.sleep(0.05)


def test_a_crowd_of_connections_keeps_nobody_out(server: Server) -> None:
    sockets = [connect(server) for _ in range(600)]
    assert server.http.get("/health").status_code == 200
    assert httpx.get(f"{server.url}/health", timeout=WAIT).status_code == 200
    wait_until(lambda: len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())) < 400)
    for each in sockets:
        each.close()


def test_grammars_that_overflow_a_stack(server: Server) -> None:
    """Ten of ten ended the server."""
    bombs = grammar_bombs()
    server.complete(max_tokens=2, guided_choice=["a", "b"])  # starts the helper
    with beside(server) as other, ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda bomb: server.complete(**bomb), bombs))
        assert server.complete(max_tokens=2, guided_choice=["yes", "no"]).status_code == 200
    for answer, bomb in zip(answers, bombs, strict=True):
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == next(iter(bomb))
    assert sum(answer.status_code == 400 for answer in answers) >= len(CHAINS)
    assert not other.failures


def test_log_probabilities_of_many_prompts(server: Server) -> None:
    """An answer of 580 MB took 4.9 GiB."""
    prompts = [[(7 * i + j) % 400 + 3 for j in range(4000)] for i in range(100)]
    for body in ({"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}):
        answer = server.complete(prompts, max_tokens=1, **body)
        assert answer.status_code == 400, answer.text[:300]
        error = answer.json()["error"]
        assert error["param"] in body and "at most 524288" in error["message"]
    assert server.complete("a", n=128, max_tokens=4000, logprobs=20).status_code == 400
    assert server.complete("a", max_tokens=2, logprobs=20).status_code == 200


@pytest.mark.parametrize("stream", [True, *slow(False)])
def test_a_long_list_of_log_probabilities_beside_a_stream(server: Server, stream: bool) -> None:
    """The largest answer that is allowed. That others go on meanwhile: test_completions.py."""
    prompts = [[(7 * i + j) % 400 + 3 for j in range(4000)] for i in range(3)]
    body = {"echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    with beside(server) as other:
        answer = server.complete(prompts, **body)
    assert answer.status_code == 200
    found = [choice for part in payloads(answer) for choice in part["choices"]]
    for choice in sorted(found, key=lambda choice: choice["index"]):
        scored = choice["logprobs"]
        assert scored["token_logprobs"][0] is None and len(scored["text_offset"]) == 4001
        assert all(len(lists) == 4001 for lists in scored.values())
        offsets = scored["text_offset"]
        assert offsets == sorted(offsets) and 4001 < offsets[-1] <= len(choice["text"])
    assert len(found) == 3
    assert not other.failures


@pytest.mark.slow
def test_streams_that_nobody_reads(server: Server) -> None:
    """They stayed for ever, with all that they had to say."""
    body = {"prompt": "a", "stream": True, "max_tokens": 4000, "logprobs": 20, "ignore_eos": True}
    with beside(server) as other:
        sockets = [sent(server.url, body) for _ in range(24)]
        wait_until(lambda: len(server.stats()["requests"]) > 20)
        wait_until(lambda: len(server.stats()["requests"]) <= 1)
    assert "did not read its answer" in server.text
    for each in sockets:
        each.settimeout(WAIT)
        with suppress(ConnectionError):
            while piece := each.recv(2**20):
                assert b"[DONE]" not in piece
        each.close()
    assert not other.failures


def test_who_reads_slowly_gets_everything(server: Server) -> None:
    body = {"prompt": "a", "stream": True, "max_tokens": 1000, "logprobs": 20, "ignore_eos": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        pieces = []
        for piece in answer.iter_bytes(2**16):
            pieces.append(piece)
            time.sleep(0.05)  # the server's buffers are full all the time
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")


def test_an_engine_that_is_stopped_is_not_healthy(server: Server) -> None:
    """``/health`` said 200 while nobody could be answered."""
    assert server.http.get("/health").status_code == 200
    os.kill(server.engine, signal.SIGSTOP)
    try:
        wait_until(lambda: server.http.get("/health").status_code == 503)
        error = server.http.get("/health").json()["error"]
        assert error["code"] == "engine_suspended" and "SIGCONT" in error["message"]
        assert server.http.get("/version").status_code == 200
    finally:
        os.kill(server.engine, signal.SIGCONT)
    wait_until(lambda: server.http.get("/health").status_code == 200)
    assert server.complete(max_tokens=2).status_code == 200


def beside(server: Server) -> Bystander:
    return Bystander(server.url, (server.process.pid, server.engine))


def connect(server: Server) -> socket.socket:
    where = urlsplit(server.url)
    return socket.create_connection((str(where.hostname), int(where.port or 80)), timeout=WAIT)


def answer_of(each: socket.socket) -> bytes | None:
    """What came until the server closed; ``None`` if it did not."""
    found = b""
    try:
        while part := each.recv(4096):
            found += part
    except TimeoutError:
        return None
    except OSError:
        pass
    finally:
        each.close()
    return found
