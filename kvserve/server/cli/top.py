"""``kvserve top``: the pool and the requests in the terminal, from the live page's event stream."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Generator
from itertools import accumulate

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvserve.log import ConfigError, RequestError
from kvserve.server.cli import terminal
from kvserve.server.cli.terminal import Json

_ROWS = 8
"""The most lines for the pool; in a larger pool a character stands for several cells."""
_NUMBERS = 56
"""Width of a request's numbers, in characters."""
_FIRST_REQUEST = 4
_KINDS = (
    ("free", "bright_black", "·"),
    ("cached prefix", "white", "▒"),
    ("logged queries", "yellow", "▪"),
    ("codes", "magenta", "▪"),
)
_COLOURS = ("green", "blue", "cyan", "red", "bright_green", "bright_blue", "bright_cyan")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    terminal.add_server_arguments(parser)
    parser.add_argument("--once", action="store_true", help="show it once and exit")


def run(args: argparse.Namespace) -> int:
    console = Console()
    with contextlib.closing(_events(args.url, args.api_key)) as events:
        first = next(events, None)
        if first is None:
            raise RequestError("the server has ended the stream")
        if args.once or not sys.stdout.isatty():
            console.print(Screen(console.width).draw(first))
            return 0
        with Live(console=console, screen=True, auto_refresh=False) as live:
            screen = Screen(console.width)
            live.update(screen.draw(first), refresh=True)
            for event in events:
                screen.width = console.width
                live.update(screen.draw(event), refresh=True)
    return 0


class Screen:
    """Draws events; keeps the last ten for rates per second."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._past: list[Json] = []

    def draw(self, event: Json) -> RenderableType:
        self._past = [*self._past[-9:], event]
        return Group(
            Text(_pool_line(event)),
            Text(self._traffic_line()),
            *([_cells(event, self.width), _legend()] if event["cells"] else []),
            Text(),
            _requests(event, self.width),
        )

    def _traffic_line(self) -> str:
        """Tokens per second over the last events, and how many requests run and wait."""
        before, now = self._past[0], self._past[-1]
        seconds = max(now["time"] - before["time"], 1e-3)
        made = (now["generation_tokens_total"] - before["generation_tokens_total"]) / seconds
        read = (now["prompt_tokens_total"] - before["prompt_tokens_total"]) / seconds
        speed = f"{made:.0f} tokens/s, {read:.0f} of prompts; " if len(self._past) > 1 else ""
        return (
            f"{speed}{now['num_running']} running, {now['num_waiting']} waiting, "
            f"{now['preemptions_total']} preemptions, {now['swaps_total']} of them swaps"
        )


def _pool_line(event: Json) -> str:
    total, free, cached = (event[f"blocks_{name}"] for name in ("total", "free", "cached"))
    logical, held = event["tokens_logical"], event["tokens_held"]
    share = f" ({100 * held / logical:.1f} %)" if logical else ""
    return (
        f"pool: {total - free - cached} of {total} blocks in use, {cached} cached; tokens: {held} "
        f"of {logical} held{share}; {event['compactions_total']} compactions released "
        f"{event['blocks_released_total']} blocks"
    )


def _cells(event: Json, width: int) -> Text:
    """The pool, one character per cell. If a character stands for several, it shows the first."""
    runs = event["cells"]["runs"]
    owners, ends = runs[::2], list(accumulate(runs[1::2]))
    step = max(1, -(-ends[-1] // (_ROWS * max(width, 1)))) if ends else 1
    text, at = Text(no_wrap=False), 0
    for number, cell in enumerate(range(0, ends[-1] if ends else 0, step)):
        while ends[at] <= cell:
            at += 1
        if number and number % width == 0:
            text.append("\n")
        text.append(*_mark(owners[at]))
    return text


def _mark(owner: int) -> tuple[str, str]:
    """The character of a block's owner, and its colour."""
    if owner < _FIRST_REQUEST:
        _, colour, mark = _KINDS[owner]
        return mark, colour
    return "█", _COLOURS[(owner - _FIRST_REQUEST) % len(_COLOURS)]


def _legend() -> Text:
    text = Text()
    for name, colour, mark in _KINDS:
        text.append(f"{mark} ", colour)
        text.append(f"{name}  ")
    return text.append("█ requests, in the colour of their line")


def _requests(event: Json, width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("request", no_wrap=True, max_width=max(width - _NUMBERS, 8))
    for name in ("policy", "tokens", "held", "blocks", "log", "events"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, request in enumerate(event["requests"]):
        share = 100 * request["held_tokens"] / max(request["logical_tokens"], 1)
        table.add_row(
            Text(request["request_id"], _mark(_FIRST_REQUEST + index)[1]),
            Text(request["policy"]),
            str(request["logical_tokens"]),
            f"{request['held_tokens']} ({share:.0f} %)",
            str(request["blocks"]),
            str(request.get("log_blocks", "-")),
            str(request["compactions"]),
        )
    return table


def _events(url: str, api_key: str | None) -> Generator[Json, None, None]:
    """The events of ``/v1/kv/events`` until the server ends; errors have the server's message."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    base = url.rstrip("/").removesuffix("/v1")
    timeout = httpx.Timeout(10.0, read=60.0)  # an idle stream sends pings
    try:
        with httpx.stream("GET", f"{base}/v1/kv/events", headers=headers, timeout=timeout) as found:
            if found.is_error:
                found.read()
            for line in terminal.checked(found).iter_lines():
                if line.startswith("data: "):
                    yield json.loads(line.removeprefix("data: "))
    except httpx.ConnectError as exc:
        raise ConfigError(f"--url: no server at {base}: {exc}") from None
    except httpx.HTTPError as exc:
        raise RequestError(f"the connection broke: {exc}") from None
