"""``kvserve complete``: lets a running server continue texts, in the terminal."""

from __future__ import annotations

import argparse

from kvserve.server.cli import terminal
from kvserve.server.cli.terminal import Json, Terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    client = Terminal(args)
    return client.each_line(
        args.quick, lambda text: client.answer("/completions", {"prompt": text}, _text)
    )


def _text(choice: Json) -> str:
    return str(choice["text"])
