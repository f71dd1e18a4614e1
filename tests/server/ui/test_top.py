"""``kvserve top`` against a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from kvserve.server.cli import commands as cli
from kvserve.server.cli.top_screen import Screen
from tests.server.cli.pseudo_terminal import Pty
from tests.server.conftest import RunningServer, StartServer
from tests.server.ui.test_event_feed import STATS, VIEW, read


def shown(event: dict[str, Any], width: int = 100) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(Screen(width).draw(event, 0.0))
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
    assert "cmpl-a-0" in out and "query log" not in out


def test_rates_go_to_zero_when_nothing_comes(server: RunningServer) -> None:
    server.engine.pool = VIEW
    (event,) = read(server, 1)
    server.engine.pool = None
    screen = Screen(100)
    screen.draw(event, 10.0)
    assert "guesses" not in screen._traffic_line()
    guesses = {"drafted_tokens_total": 9, "accepted_tokens_total": 7}
    later = {**event, "generation_tokens_total": 107, "speculation": guesses}
    screen.draw(later, 12.0)
    assert "50 tokens/s, 0 of prompts" in screen._traffic_line()
    assert screen._traffic_line().endswith("; 7 of 9 guesses right")
    screen.draw(later, 16.0)
    assert "0 tokens/s, 0 of prompts" in screen._traffic_line()
    screen.draw(event, 16.5)
    assert "tokens/s" not in screen._traffic_line(), "a server that began again"


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


def test_what_does_not_fit_is_counted(server: RunningServer) -> None:
    many = replace(STATS, num_running=60, requests=STATS.requests * 60)
    server.engine.pool = replace(VIEW, stats=many, log_blocks=[1] * 60)
    (event,) = read(server, 1)
    server.engine.pool = None
    console = Console(width=80, height=24)
    with console.capture() as capture:
        console.print(Screen(80, 24).draw(event, 0.0))
    lines = capture.get().splitlines()
    rows = sum("cmpl-a" in line for line in lines)
    assert len(lines) == 24 and rows > 10
    assert lines[-1].strip() == f"+{60 - rows} more"


def test_at_a_terminal_it_waits_shows_who_is_lost_and_leaves(start_server: StartServer) -> None:
    server = start_server(ready=False)
    server.engine.pool = VIEW
    with Pty("top", "--url", server.url) as top:
        top.wait_for("still loading")
        server.call(server.state.mark_ready)
        top.wait_for("org/fake, policy none")
        top.wait_for("5 of 10 blocks in use")
        server.state.draining = True
        top.wait_for("the figures are old")
        assert top.process.poll() is None
        top.type("q")
        assert top.ended() == 0


def test_a_wrong_key_is_no_reason_to_wait(start_server: StartServer) -> None:
    server = start_server(api_keys=("k",))
    with Pty("top", "--url", server.url, "--api-key", "wrong") as top:
        top.wait_for("API key")
        assert top.ended() == 1
