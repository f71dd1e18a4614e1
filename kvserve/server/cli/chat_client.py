"""``kvserve chat``: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from kvserve.log import ConfigError, RequestError
from kvserve.server.cli import terminal
from kvserve.server.cli.terminal import LEAVE, Json, Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="system message that begins the conversation"
    )


def run(args: argparse.Namespace) -> int:
    chat = Chat(Terminal(args), args.system_prompt)
    if args.quick is None and sys.stdin.isatty():
        chat.greet()
    return chat.client.each_line(args.quick, chat.answer if args.quick else chat.take)


class Chat:
    """A conversation, and commands about it that begin with a slash."""

    def __init__(self, client: Terminal, system: str | None) -> None:
        self.client = client
        self._system = system
        self._messages: list[Json] = []
        self._commands: dict[str, tuple[str, Callable[[str], object]]] = {
            "help": ("list these commands", lambda _: self._help()),
            "clear": ("forget the conversation", lambda _: self._messages.clear()),
            "retry": ("answer the last message again", lambda _: self._retry()),
            "system": ("TEXT  set the system prompt; no text: none", self._set_system),
            "policy": ("NAME or JSON  set the KV policy; nothing: the server's own", self._policy),
            "stats": ("show what the cache held, or no longer", lambda _: self._toggle_stats()),
            "quit": ("leave, as Ctrl-D does", lambda _: LEAVE),
        }

    def greet(self) -> None:
        _say(f"{self.client.model} at {self.client.url}; /help lists commands, Ctrl-D leaves")

    def take(self, line: str) -> object:
        """Answer a line, or do what it says if it begins with one slash."""
        if not line.startswith("/") or line.startswith("//"):
            self.answer(line.removeprefix("/"))
            return None
        name, _, rest = line[1:].partition(" ")
        if name not in self._commands:
            raise RequestError(f"no command /{name}; /help lists them, // begins a message with /")
        return self._commands[name][1](rest.strip())

    def answer(self, text: str) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        turn = [*self._messages, {"role": "user", "content": text}]
        reply = self.client.answer("/chat/completions", {"messages": [*system, *turn]}, _text)
        # Added only after the answer: a refused question must not stay in the conversation.
        self._messages = [*turn, {"role": "assistant", "content": reply}]

    def _retry(self) -> None:
        if not self._messages:
            raise RequestError("nothing has been said yet")
        before = self._messages
        *self._messages, asked, _ = before
        try:
            self.answer(asked["content"])
        except BaseException:
            self._messages = before
            raise

    def _policy(self, text: str) -> None:
        try:
            self.client.set_policy(text)
        except ConfigError as exc:
            raise RequestError(str(exc)) from None

    def _set_system(self, text: str) -> None:
        self._system = text or None

    def _toggle_stats(self) -> None:
        self.client.stats = not self.client.stats

    def _help(self) -> None:
        for name, (about, _) in self._commands.items():
            _say(f"/{name:7} {about}")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _text(choice: Json) -> str:
    return choice["delta"].get("content") or ""
