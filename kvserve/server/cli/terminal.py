"""What ``kvserve chat`` and ``kvserve complete`` share: flags, requests and their streams."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from kvserve.log import ConfigError, RequestError
from kvserve.server.settings.args import read_size

Json = dict[str, Any]


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
        self._stats = args.stats
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
        if self._stats and usage is not None:
            sys.stderr.write(_summary(usage) + "\n")
        return "".join(parts)

    def each_line(self, quick: str | None, answer: Callable[[str], object]) -> int:
        """Answer ``quick`` alone, or every line that is typed until the end of the input."""
        if quick is not None:
            answer(quick)
            return 0
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt)
            except EOFError:
                return 0
            if not line.strip():
                continue
            try:
                answer(line)
            except RequestError as exc:
                sys.stderr.write(f"error: {exc}\n")
            except KeyboardInterrupt:
                sys.stderr.write("\nstopped; Ctrl-C again leaves\n")

    def _first_model(self) -> str:
        try:
            models = checked(self._http.get("/models")).json()["data"]
        except httpx.HTTPError as exc:
            raise ConfigError(f"--url: no server at {self._http.base_url}: {exc}") from None
        return str(models[0]["id"])

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
            message = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = f"{response.status_code} from {response.url}"
        raise RequestError(message)
    return response


def _fields(args: argparse.Namespace) -> Json:
    fields = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    if args.kv_policy is not None:
        fields["kv_policy"] = args.kv_policy
        if args.kv_policy.startswith("{"):
            try:
                fields["kv_policy"] = json.loads(args.kv_policy)
            except ValueError as exc:
                raise ConfigError(f"--kv-policy is not JSON: {exc}") from None
    return {name: value for name, value in fields.items() if value is not None}


def _summary(usage: Json) -> str:
    kv = usage.get("kv_cache_details") or {}
    return (
        f"[{usage['prompt_tokens']} + {usage['completion_tokens']} tokens; policy "
        f"{kv.get('policy')}: {kv.get('held_tokens')} of {kv.get('logical_tokens')} held, "
        f"{kv.get('compactions')} compactions, {kv.get('blocks_released')} blocks released]"
    )
