"""Requests that once ended the server, filled its memory or made others wait, beside a stream.

How long others wait is measured by `python -m bench.soak.attacks`, alone on a machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from bench.soak.bombs import CHAINS, grammar_bombs
from bench.soak.bystander import Bystander
from tests.server.real_server import Server
from tests.thinning import slow
from tests.waiting import WAIT, wait_until


@pytest.fixture
def server(real_server: Server) -> Server:
    return real_server


@pytest.fixture(autouse=True)
def _the_server_is_well(server: Server) -> Iterator[None]:
    yield
    assert server.process.poll() is None, server.text
    wait_until(server.idle)
    assert "Traceback" not in server.text, server.text


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
    choices = [line.removeprefix("data: ") for line in answer.text.splitlines() if "{" in line]
    found = [choice for text in choices for choice in json.loads(text)["choices"]]
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
    text = json.dumps(body)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}"
    request = f"{head}\r\nContent-Type: application/json\r\n\r\n{text}".encode()
    sockets = [deaf(server) for _ in range(24)]
    with beside(server) as other:
        for each in sockets:
            each.sendall(request)
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


def test_a_grammar_that_nothing_matches_says_so(server: Server) -> None:
    """The answer was ``NoExtensionBias``."""
    empty = r"[^\s\S]"
    for body in (
        {"guided_regex": empty},
        {"structured_outputs": {"grammar": f'start: "a" B\nB: /{empty}/'}},
    ):
        answer = server.complete(**body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == next(iter(body)) and "no text matches it" in error["message"]
        assert "Bias" not in answer.text


def beside(server: Server) -> Bystander:
    return Bystander(server.url, (server.process.pid, server.engine))


def deaf(server: Server) -> socket.socket:
    """A connection whose client has next to no room for an answer."""
    where = urlsplit(server.url)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect((str(where.hostname), int(where.port or 80)))
    return made
