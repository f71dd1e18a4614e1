"""What ``kvserve top`` shows: the pool as characters, and a row for each request."""

from __future__ import annotations

from itertools import accumulate

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvserve.server.cli.terminal import Json

_RATE_S = 3.0
"""Rates are those of so many seconds."""
_ROWS = 8
"""The most lines for the pool; in a larger pool a character stands for several cells."""
_NUMBERS = 56
"""Width of a request's numbers, in characters."""
_FIRST_REQUEST = 4
_KINDS = (
    ("free", "bright_black", "·"),
    ("cached prefix", "white", "▒"),
    ("query log", "yellow", "▪"),
    ("codebook", "magenta", "▪"),
)
_COLOURS = ("green", "blue", "cyan", "red", "bright_green", "bright_blue", "bright_cyan")


class Screen:
    """Draws what is known at a moment; keeps the last seconds for rates.

    With a ``height`` there are no more rows than fit, and the last line says how many do not.
    """

    def __init__(self, width: int, height: int | None = None) -> None:
        self.width, self.height = width, height
        self._past: list[tuple[float, Json]] = []

    def draw(self, event: Json, now: float, head: Text | None = None) -> RenderableType:
        """The screen at second ``now``, under ``head``."""
        if self._past and event["generation_tokens_total"] < self._newest("generation"):
            self._past.clear()  # another server
        recent = [(at, past) for at, past in self._past if at >= now - _RATE_S]
        self._past = [*(recent or self._past[-1:]), (now, event)]
        above = Group(
            *([head] if head else []),
            Text(_pool_line(event)),
            Text(self._traffic_line()),
            *([_cells(event, self.width), _legend()] if event["cells"] else []),
            Text(),
        )
        return Group(above, *_requests(event, self.width, self._room_below(above)))

    def _room_below(self, above: RenderableType) -> int | None:
        if self.height is None:
            return None
        console = Console(width=self.width)
        return max(1, self.height - len(console.render_lines(above)) - 1)

    def _newest(self, kind: str) -> int:
        return int(self._past[-1][1][f"{kind}_tokens_total"])

    def _traffic_line(self) -> str:
        """Tokens per second over the last seconds, and how many requests run and wait."""
        (began, before), (ended, now) = self._past[0], self._past[-1]
        seconds = max(ended - began, 1e-3)
        made = (now["generation_tokens_total"] - before["generation_tokens_total"]) / seconds
        read = (now["prompt_tokens_total"] - before["prompt_tokens_total"]) / seconds
        speed = f"{made:.0f} tokens/s, {read:.0f} of prompts; " if len(self._past) > 1 else ""
        guesses = now["speculation"]
        right = f"{guesses['accepted_tokens_total']} of {guesses['drafted_tokens_total']}"
        guessed = f"; {right} guesses right" if guesses["drafted_tokens_total"] else ""
        return (
            f"{speed}{now['num_running']} running, {now['num_waiting']} waiting, "
            f"{now['preemptions_total']} preemptions, {now['swaps_total']} of them swaps{guessed}"
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


def _requests(event: Json, width: int, room: int | None) -> list[RenderableType]:
    """A row for each request, and a line for those that do not fit into ``room`` lines."""
    requests = event["requests"]
    left_out = 0 if room is None or len(requests) <= room else len(requests) - room + 1
    table = _table(requests[: len(requests) - left_out], width)
    return [table, Text(f"+{left_out} more", "bright_black")] if left_out else [table]


def _table(requests: list[Json], width: int) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("request", no_wrap=True, max_width=max(width - _NUMBERS, 8))
    for name in ("policy", "tokens", "held", "blocks", "log", "events"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, request in enumerate(requests):
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
