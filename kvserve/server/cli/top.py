"""``kvserve top``: the pool and the requests in the terminal, from the live page's event stream."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.styled import Styled
from rich.text import Text

from kvserve.log import RequestError
from kvserve.server.cli import terminal
from kvserve.server.cli.keys import key_within, single_keys
from kvserve.server.cli.top_feed import Feed
from kvserve.server.cli.top_screen import Screen

_REDRAW_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_server_arguments(parser)
    parser.add_argument("--once", action="store_true", help="show it once and exit")


def run(args: argparse.Namespace) -> int:
    console = Console()
    with contextlib.closing(Feed(args.url, args.api_key)) as feed:
        if args.once or not sys.stdout.isatty():
            return _once(console, feed)
        feed.check_key()
        feed.start()
        _watch(console, feed)
    return 0


def _once(console: Console, feed: Feed) -> int:
    with contextlib.closing(feed.events()) as events:
        first = next(events, None)
    if first is None:
        raise RequestError("the server has ended the stream")
    console.print(Screen(console.width).draw(first, 0.0))
    return 0


def _watch(console: Console, feed: Feed) -> None:
    """Draw until ``q`` is pressed. What is wrong with the server stands above its last figures."""
    screen = Screen(console.width, console.height)
    with single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            screen.width, screen.height = console.width, console.height
            live.update(_picture(screen, feed), refresh=True)
            if key_within(_REDRAW_S) in ("q", "Q"):
                return


def _picture(screen: Screen, feed: Feed) -> RenderableType:
    head = Text(f"{feed.served or 'kvserve top'} at {feed.base}; q leaves", "bold")
    if feed.wrong:
        seconds = int(time.time() - feed.since)
        old = ", the figures are old" if feed.event else ""
        head.append(f"\n{feed.wrong} ({seconds} s{old}); trying again every second", "bold yellow")
    if feed.event is None:
        return Group(head)
    picture = screen.draw(feed.event, time.monotonic(), head)
    return Styled(picture, "dim") if feed.wrong else picture
