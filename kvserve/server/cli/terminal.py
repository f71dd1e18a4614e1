"""What ``kvserve chat`` and ``kvserve complete`` share: flags, requests and their streams."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from kvserve.log import ConfigError, RequestError
from kvserve.server.settings.args import read_size

Json = dict[str, Any]
LEAVE = object()
"""What an answering function returns to end a session."""
_AGAIN_S = 1.0


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags for the server's address and key."""
    parser.add_argument(
        "--url", default="http://localhost:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("KVSERVE_API_KEY") or os.environ.get("OPENAI_API_KEY"),
        help="key to send (default: KVSERVE_API_KEY or OPENAI_API_KEY)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument(
        "--model-name", "--model", help="served name of the model (default: the first)"
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="answer this one text and exit")
    parser.add_argument("--max-tokens", type=read_size, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    parser.add_argument(
        "--kv-policy", metavar="NAME|JSON", help='KV policy of the requests, "none" for exact'
    )
    parser.add_argument("--stats", action="store_true", help="show what the cache held, on stderr")


class Terminal:
    """Sends requests to a server, and prints answers while they stream."""

    def __init__(self, args: argparse.Namespace) -> None:
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        timeout = httpx.Timeout(10.0, read=None)
        url = args.url.rstrip("/").removesuffix("/v1") + "/v1"
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout)
        self.stats = args.stats
        self.url = url
        self._waits = args.quick is None and sys.stdin.isatty()
        self._fields = _fields(args)
        self._fields["model"] = args.model_name or self._first_model()

    def answer(self, path: str, body: Json, read: Callable[[Json], str]) -> str:
        """Print the answer to ``body`` while it streams; returns its text."""
        body = {**self._fields, **body, "stream": True, "stream_options": {"include_usage": True}}
        parts, usage = [], None
        for chunk in self._events(path, body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                text = read(choice)
                parts.append(text)
                sys.stdout.write(text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        if self.stats and usage is not None:
            sys.stderr.write(_summary(usage) + "\n")
        return "".join(parts)

    def each_line(self, quick: str | None, answer: Callable[[str], object]) -> int:
        """Answer ``quick`` alone, or every line that is typed until the end of the input.

        ``answer`` returns ``LEAVE`` to end it before.
        """
        if quick is not None:
            answer(quick)
            return 0
        typed = sys.stdin.isatty()
        while True:
            try:
                line = input("> " if typed else "")
            except EOFError:
                if typed:
                    sys.stderr.write("\nbye\n")
                return 0
            if not line.strip():
                continue
            try:
                if answer(line) is LEAVE:
                    return 0
            except RequestError as exc:
                sys.stderr.write(f"error: {exc}\n")
            except KeyboardInterrupt:
                sys.stderr.write("\nstopped; Ctrl-C again leaves\n")

    @property
    def model(self) -> str:
        return str(self._fields["model"])

    def set_policy(self, text: str) -> None:
        """The KV policy of the next requests: a name, JSON, or nothing for the server's own."""
        policy = _policy(text) if text else None
        self._fields.pop("kv_policy", None)
        if policy is not None:
            self._fields["kv_policy"] = policy

    def _first_model(self) -> str:
        """The first served model. A person at a terminal waits until there is one."""
        told = ""
        while True:
            try:
                return self._ask_for_model()
            except (ConfigError, RequestError) as exc:
                if not (self._waits and _may_come(exc)):
                    raise
                if str(exc) != told:
                    told = str(exc)
                    sys.stderr.write(f"waiting: {told.removeprefix('--url: ')} (Ctrl-C leaves)\n")
                time.sleep(_AGAIN_S)

    def _ask_for_model(self) -> str:
        try:
            answer = self._http.get("/models")
        except httpx.HTTPError as exc:
            raise ConfigError(f"--url: no server at {self._http.base_url}: {exc}") from None
        return str(checked(answer).json()["data"][0]["id"])

    def _events(self, path: str, body: Json) -> Iterator[Json]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    response.read()
                for line in checked(response).iter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise RequestError(chunk["error"]["message"])
                        yield chunk
        except httpx.HTTPError as exc:
            raise RequestError(f"the connection broke: {exc}") from None


def checked(response: httpx.Response) -> httpx.Response:
    """Return ``response``; raises ``RequestError`` with the server's message if it is an error."""
    if response.is_error:
        try:
            error = response.json()["error"]
            message, code = error["message"], error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            message, code = f"{response.status_code} from {response.url}", None
        raise RequestError(message, code=code)
    return response


def _may_come(error: Exception) -> bool:
    """Whether there may be a server later that answers."""
    return isinstance(error, ConfigError) or getattr(error, "code", None) in ("loading", "draining")


def _fields(args: argparse.Namespace) -> Json:
    fields = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.kv_policy is not None:
        fields["kv_policy"] = _policy(args.kv_policy)
    return {name: value for name, value in fields.items() if value is not None}


def _policy(text: str) -> str | Json:
    if not text.startswith("{"):
        return text
    try:
        policy: Json = json.loads(text)
    except ValueError as exc:
        raise ConfigError(f"--kv-policy is not JSON: {exc}") from None
    return policy


def _summary(usage: Json) -> str:
    kv = usage.get("kv_cache_details") or {}
    return (
        f"[{usage['prompt_tokens']} + {usage['completion_tokens']} tokens; policy "
        f"{kv.get('policy')}: {kv.get('held_tokens')} of {kv.get('logical_tokens')} held, "
        f"{kv.get('compactions')} compactions, {kv.get('blocks_released')} blocks released]"
    )
