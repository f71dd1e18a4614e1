"""``kvserve chat``: a conversation with a running server, in the terminal."""

from __future__ import annotations

import argparse

from kvserve.server.cli import terminal
from kvserve.server.cli.terminal import Json, Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="system message that begins the conversation"
    )


def run(args: argparse.Namespace) -> int:
    client = Terminal(args)
    messages: list[Json] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(text: str) -> None:
        turn = [*messages, {"role": "user", "content": text}]
        reply = client.answer("/chat/completions", {"messages": turn}, _text)
        # Added only after the answer: a refused question must not stay in the conversation.
        messages[:] = [*turn, {"role": "assistant", "content": reply}]

    return client.each_line(args.quick, answer)


def _text(choice: Json) -> str:
    return choice["delta"].get("content") or ""
