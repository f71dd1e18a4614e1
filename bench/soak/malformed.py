"""Malformed bodies, and raw bytes that are not HTTP, all of which the server has to withstand.

Deterministic by seed, so that a request that broke something can be made again.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
    "/abort_requests",
)
POLICIES = (
    *("none", "kara", "streaming_llm", "h2o", "snapkv", "rkv", "keydiff", "chunkkv"),
    *("pyramidkv", "pyramidinfer", "dynamickv", "windowkv", "adakv", "spindlekv", "nothing"),
)
POLICY_FIELDS = (
    *("budget", "ratio", "window", "buffer", "period", "sinks", "recent", "kernel_size"),
    *("pooling", "chunk_size", "reuse_layers", "align", "mode", "max_chunk", "threshold"),
    *("trigger", "scorer", "query_reduce", "query_dtype", "flush_every", "budgett", ""),
)
FIELDS = (
    *("model", "prompt", "messages", "input", "tokens", "stream", "stream_options", "max_tokens"),
    *("max_completion_tokens", "min_tokens", "n", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "stop_token_ids", "ignore_eos", "seed", "logprobs", "prompt_logprobs", "echo"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    *("allowed_token_ids", "bad_words", "priority", "truncate_prompt_tokens", "response_format"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("kv_policy", "request_id", "tools", "tool_choice", "parallel_tool_calls", "request_ids"),
    *("chat_template", "chat_template_kwargs", "reasoning_effort", "top_logprobs", "metadata"),
    *("thinking_token_budget", "add_generation_prompt", "continue_final_message", "text"),
    *("instructions", "max_output_tokens", "best_of", "suffix", "user", "unknown_field"),
)
INTEGERS = (
    *(-(2**70), -(2**63) - 1, -(2**63), -(2**31) - 1, -(2**31), -2, -1, 0, 1, 2, 3, 17, 255, 256),
    *(4095, 4096, 4097, 2**15, 2**16, 2**31 - 129, 2**31 - 1, 2**31, 3_000_000_000, 2**32),
    *(10**12, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30),
)
TEXTS = (
    *("", "a", "none", "kara", "null", "true", "1", "1e999999999", "1/3", "0/0", "nan", "\0"),
    *("\ud800", "a\udfffb", "\U0010ffff", "é" * 40, "../../etc/passwd", "{{ 7 * 7 }}", "[" * 50),
    *("(a{1000}){1000}", "(a?){500}a{500}", "start: start start", "%s%n", "\r\nX: y"),
)


@dataclass(frozen=True)
class Malformed:
    """A body for a route; ``content_type`` as it is sent."""

    path: str
    body: bytes
    content_type: str = "application/json"


def malformed(seed: int) -> Malformed:
    """A malformed request of a random kind."""
    rng = random.Random(seed)
    kind = rng.choices(_KINDS, _WEIGHTS)[0]
    return kind(rng, rng.choice(ROUTES))


def raw(seed: int) -> bytes:
    """Raw bytes to send to a socket."""
    rng = random.Random(seed)
    method = rng.choice((b"GET", b"POST", b"PUT", b"FOO", b"", b"\x16\x03\x01", b"PRI"))
    path = rng.choice(
        (b"/health", b"/v1/completions", b"/" + b"a" * 5000, b"*", b"\xff", b"", b"?")
    )
    version = rng.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"\0"))
    lines = [b" ".join((method, path, version)), b"Host: a"]
    for _ in range(rng.randint(0, 8)):
        lines.append(rng.choice(_HEADERS))
    body = rng.choice((b"", b"{}", b'{"prompt": "a"', bytes(rng.randrange(256) for _ in range(50))))
    end = rng.choice((b"\r\n\r\n", b"\n\n", b"\r\n", b""))
    message = b"\r\n".join(lines) + end + body
    return message[: rng.randint(0, len(message))] if rng.random() < 0.3 else message


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


_HEADERS = (
    *(b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999"),
    *(b"Content-Length: 5, 5", b"Content-Length: \xb2", b"Transfer-Encoding: chunked"),
    *(b"Transfer-Encoding: identity, chunked", b"Content-Type: application/json", b": nothing"),
    *(b"Content-Type: multipart/form-data; boundary=a", b"Connection: Upgrade", b"Upgrade: h2c"),
    *(b"Expect: 100-continue", b"X-Request-Id: \x00", b"X-Request-Id: " + b"a" * 200, b"no colon"),
    *(b"Authorization: Bearer \xff", b"A: " + b"b" * 9000, b"Content-Encoding: gzip"),
    *(b"Cookie: " + b"a=b; " * 100, b"\x00\x01: a", b"Host: \xff", b"traceparent: 00-0-0-00"),
)


def _value(rng: random.Random, depth: int = 0) -> Any:
    """Any value that JSON allows, and some that it does not."""
    pick = rng.random()
    if pick < 0.3:
        return rng.choice(INTEGERS)
    if pick < 0.4:
        return rng.choice((0.5, -1.5, 1e308, 1e-320, float("inf"), float("nan"), 3.0, 2.0**64))
    if pick < 0.6:
        return rng.choice(TEXTS)
    if pick < 0.7:
        return rng.choice((None, True, False))
    if depth > 3:
        return []
    if pick < 0.85:
        return [_value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
    return {rng.choice(TEXTS + FIELDS): _value(rng, depth + 1) for _ in range(rng.randint(0, 4))}


def _prompted(path: str) -> dict[str, Any]:
    """A valid body with the least that a route needs."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
        "/v1/chat/completions": chat,
        "/v1/responses": {"input": "Hi", "max_output_tokens": 2},
        "/v1/messages": chat,
        "/v1/messages/count_tokens": {"messages": chat["messages"]},
        "/tokenize": {"prompt": "Hi"},
        "/detokenize": {"tokens": [5]},
        "/abort_requests": {"request_ids": ["x"]},
    }
    return bodies[path].copy()


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


def _one_field(rng: random.Random, path: str) -> Malformed:
    """A valid request with one to three fields of any value."""
    body = _prompted(path)
    for _ in range(rng.randint(1, 3)):
        body[rng.choice(FIELDS)] = _value(rng)
    body["max_tokens"] = body.get("max_tokens", 2)
    return Malformed(path, _dump(body))


def _policy(rng: random.Random, path: str) -> Malformed:
    """A policy with fields of any value."""
    spec: dict[str, Any] = {"name": rng.choice(POLICIES)}
    for _ in range(rng.randint(1, 3)):
        value = rng.choice(INTEGERS) if rng.random() < 0.7 else _value(rng)
        spec[rng.choice(POLICY_FIELDS)] = value
    path = "/v1/completions" if path.startswith("/v1") else path
    return Malformed(path, _dump({**_prompted(path), "kv_policy": spec}))


def _broken(rng: random.Random, path: str) -> Malformed:
    """A valid request with bytes changed, and cut."""
    text = bytearray(_dump(_prompted(path)))
    for _ in range(rng.randint(1, 5)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return Malformed(path, bytes(text[: rng.randint(0, len(text))]))


def _nested(rng: random.Random, path: str) -> Malformed:
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")))
    depth = rng.choice((20, 200, 260, 1100, 20_000))
    text = opening * depth + "1" + closing * depth
    if rng.random() < 0.5:
        field = rng.choice(FIELDS)
        text = _dump(_prompted(path)).decode()[:-1] + f', "{field}": {text}}}'
    return Malformed(path, text.encode())


def _anything(rng: random.Random, path: str) -> Malformed:
    types = ("application/json", "text/plain", "application/json; charset=utf-16", "", "a/b+json")
    return Malformed(path, _dump(_value(rng)), rng.choice(types))


def _bytes(rng: random.Random, path: str) -> Malformed:
    return Malformed(path, bytes(rng.randrange(256) for _ in range(rng.randint(0, 200))))


def _large(rng: random.Random, path: str) -> Malformed:
    """A valid request with one very large field."""
    count = rng.choice((1_000, 20_000, 100_000))
    field = rng.choice(("prompt", "stop", "stop_token_ids", "messages", "tools", "logit_bias"))
    many: Any = rng.choice(([{}] * count, ["a"] * count, [1] * count, "a " * count, [[]] * count))
    if field == "logit_bias":
        many = {str(i): rng.choice((1, "x", None)) for i in range(min(count, 20_000))}
    return Malformed(path, _dump({**_prompted(path), field: many}))


_Kind = Callable[[random.Random, str], Malformed]
_KINDS: tuple[_Kind, ...] = (_one_field, _policy, _broken, _nested, _anything, _bytes, _large)
_WEIGHTS = (40, 25, 15, 5, 10, 5, 0.5)
