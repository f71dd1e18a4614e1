"""``kvserve top`` against a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvserve.server.cli import commands as cli
from kvserve.server.cli.top import Screen
from tests.server.conftest import RunningServer, StartServer
from tests.server.ui.test_event_feed import STATS, VIEW, read


def shown(event: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Screen(width).draw(event))
    return capture.get()


def test_it_shows_the_pool_and_who_runs(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server()
    server.engine.pool = VIEW
    assert cli.run(["top", "--once", "--url", f"{server.url}/v1"]) == 0
    out = capsys.readouterr().out
    assert "5 of 10 blocks in use, 2 cached" in out and "1 running, 0 waiting" in out
    assert "···▒▒████▪" in out
    line = next(line for line in out.splitlines() if line.startswith("cmpl-a-0"))
    assert line.split()[1:] == ["kara", "90", "40", "(44", "%)", "4", "1", "2"]


def test_without_cells_it_shows_the_rest(
    start_server: StartServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start_server(api_keys=("k",))
    server.engine.stats = STATS
    assert cli.run(["top", "--url", server.url, "--api-key", "k"]) == 0, "no terminal: once"
    out = capsys.readouterr().out
    assert "cmpl-a-0" in out and "logged queries" not in out


def test_rates_are_those_of_the_last_events(server: RunningServer) -> None:
    server.engine.pool = VIEW
    (event,) = read(server, 1)
    server.engine.pool = None
    screen = Screen(100)
    screen.draw(event)
    screen.draw({**event, "time": event["time"] + 2, "generation_tokens_total": 107})
    assert "50 tokens/s, 0 of prompts" in screen._traffic_line()


def test_a_narrow_terminal_keeps_the_numbers(server: RunningServer) -> None:
    server.engine.pool = VIEW
    (event,) = read(server, 1)
    server.engine.pool = None
    lines = shown(event, 70).splitlines()
    (line,) = (line for line in lines if line.startswith("cmpl-a"))
    assert line.split()[-7:] == ["kara", "90", "40", "(44", "%)", "4", "1", "2"][-7:]
    assert max(map(len, lines)) <= 70


def test_a_large_pool_takes_few_lines(server: RunningServer) -> None:
    server.engine.pool = replace(VIEW, cells=[0, 5000, 4, 11_000])
    (event,) = read(server, 1)
    server.engine.pool = None
    lines = [line for line in shown(event).splitlines() if line.startswith(("·", "█"))]
    assert 2 <= len(lines) <= 8 + 1 and all(len(line) <= 100 for line in lines)


def test_errors_are_one_line(start_server: StartServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_server(api_keys=("k",))
    assert cli.run(["top", "--url", server.url, "--api-key", "wrong"]) == 1
    assert "API key" in capsys.readouterr().err
    assert cli.run(["top", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server at" in capsys.readouterr().err
