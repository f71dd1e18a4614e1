"""``kvserve chat`` and ``kvserve complete``: a running server in the terminal."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import httpx

from kvserve.event_reader import EventReader
from kvserve.fields import read_size
from kvserve.log import ConfigError, RequestError

Json = dict[str, Any]
_HELP = """\
/clear         forget the conversation
/system TEXT   set the system prompt; no text: none
/policy SPEC   set the KV policy, a name or JSON; nothing: the server's own
/stats         show what the cache held, or no longer
/quit          leave, as Ctrl-D does"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    own = os.environ.get("KVSERVE_API_KEY") or os.environ.get("OPENAI_API_KEY")
    url = "http://localhost:8000"
    parser.add_argument("--url", default=url, help="the server (default: %(default)s)")
    words = "key to send (default: KVSERVE_API_KEY or OPENAI_API_KEY)"
    parser.add_argument("--api-key", default=own, help=words)
    words = "served name of the model (default: the first)"
    parser.add_argument("--model-name", "--model", help=words)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="answer this one text and exit")
    parser.add_argument("--max-tokens", type=read_size, metavar="N", help="longest answer")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy")
    words = 'KV policy of the requests, "none" for exact'
    parser.add_argument("--kv-policy", metavar="NAME|JSON", help=words)
    words = "system message that begins a conversation"
    parser.add_argument("--system-prompt", metavar="TEXT", help=words)
    parser.add_argument("--stats", action="store_true", help="show what the cache held, on stderr")


def run(args: argparse.Namespace) -> int:
    client = Client(args)
    if args.quick is not None:
        client.answer(args.quick)
        return 0
    typed = sys.stdin.isatty()
    if typed:
        _say(f"{client.fields['model']} at {args.url}; /help lists commands, Ctrl-D leaves")
    while True:
        try:
            line = input("> " if typed else "")
            if line.strip() and not client.take(line):
                return 0
        except EOFError:
            if typed:
                _say("\nbye")
            return 0
        except RequestError as exc:
            _say(f"error: {exc}")
        except KeyboardInterrupt:
            _say("\nstopped; Ctrl-C again leaves")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


class Client:
    """Sends requests to a server, prints answers while they stream, and keeps a conversation."""

    def __init__(self, args: argparse.Namespace) -> None:
        headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
        self._http = httpx.Client(
            base_url=args.url.rstrip("/").removesuffix("/v1") + "/v1",
            headers=headers,
            timeout=httpx.Timeout(10.0, read=None),
        )
        self._chats, self._stats, self._system = args.chats, args.stats, args.system_prompt
        self._messages: list[Json] = []
        sampling = {"max_tokens": args.max_tokens, "temperature": args.temperature}
        self.fields = {name: value for name, value in sampling.items() if value is not None}
        if args.kv_policy:
            self.fields["kv_policy"] = _policy(args.kv_policy)
        self.fields["model"] = args.model_name or self._first_model()

    def take(self, line: str) -> bool:
        """Answer a line, or do what it says if it begins with one slash; whether to go on."""
        name, _, rest = line.partition(" ")
        if not self._chats or not line.startswith("/") or line.startswith("//"):
            self.answer(line.removeprefix("/") if self._chats else line)
        elif name == "/clear":
            self._messages.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        elif name == "/policy":
            self.fields["kv_policy"] = _policy(rest.strip())
            if not self.fields["kv_policy"]:
                del self.fields["kv_policy"]
        elif name == "/stats":
            self._stats = not self._stats
        elif name == "/help":
            _say(_HELP)
        elif name != "/quit":
            raise RequestError(f"no command {name}; /help lists them, // begins a message with /")
        return name != "/quit" or not self._chats

    def answer(self, text: str) -> None:
        """Print the answer to a text; a refused question does not stay in the conversation."""
        if not self._chats:
            self._stream("/completions", {"prompt": text})
            return
        system = [{"role": "system", "content": self._system}] if self._system else []
        turn = [*self._messages, {"role": "user", "content": text}]
        reply = self._stream("/chat/completions", {"messages": [*system, *turn]})
        self._messages = [*turn, {"role": "assistant", "content": reply}]

    def _stream(self, path: str, body: Json) -> str:
        body = {**self.fields, **body, "stream": True, "stream_options": {"include_usage": True}}
        parts, usage = [], None
        for chunk in self._chunks(path, body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                sys.stdout.write(parts[-1])
                sys.stdout.flush()
        sys.stdout.write("\n")
        if self._stats and usage is not None:
            kv = usage.get("kv_cache_details") or {}
            _say(
                f"[{usage['prompt_tokens']} + {usage['completion_tokens']} tokens; policy "
                f"{kv.get('policy')}: {kv.get('held_tokens')} of {kv.get('logical_tokens')} held, "
                f"{kv.get('compactions')} compactions, {kv.get('blocks_released')} blocks released]"
            )
        return "".join(parts)

    def _chunks(self, path: str, body: Json) -> Iterator[Json]:
        try:
            with self._http.stream("POST", path, json=body) as response:
                _check(response)
                stream = EventReader()
                for chunk in chain.from_iterable(map(stream.cut, response.iter_bytes())):
                    if "error" in chunk:
                        raise RequestError(chunk["error"]["message"])
                    yield chunk
        except httpx.HTTPError as exc:
            raise RequestError(f"the connection broke: {exc}") from None

    def _first_model(self) -> str:
        try:
            answer = self._http.get("/models")
        except httpx.HTTPError as exc:
            raise ConfigError(f"--url: no server at {self._http.base_url}: {exc}") from None
        _check(answer)
        return str(answer.json()["data"][0]["id"])


def _check(response: httpx.Response) -> None:
    """Raise ``RequestError`` with the server's message if it is an error."""
    if response.is_error:
        response.read()
        try:
            error = response.json()["error"]
            message, code = error["message"], error.get("code")
        except (ValueError, KeyError, TypeError, AttributeError):
            message, code = f"{response.status_code} from {response.url}", None
        raise RequestError(message, code=code)


def _policy(text: str) -> str | Json:
    try:
        return json.loads(text) if text.startswith("{") else text
    except ValueError as exc:
        raise RequestError(f"--kv-policy is not JSON: {exc}") from None
