"""``kvserve chat`` and ``kvserve complete`` against a server."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading

import pytest

from kvserve.server.cli import commands as cli
from tests.server.conftest import RunningServer, StartServer
from tests.server.fake_engine import FakeEngine
from tests.waiting import wait_until


def run(server: RunningServer, *argv: str) -> int:
    return cli.run([*argv, "--url", f"{server.url}/v1"])


def test_one_answer(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--max-tokens", "3", "--kv-policy", '{"name": "kara", "window": 64}', "--stats")
    assert run(server, "complete", "-q", "hi", *options) == 0
    out, err = capsys.readouterr()
    assert out == "0 1 2 \n"
    assert "policy kara" in err and "3 + 3 tokens" in err
    assert server.params.kv_policy == {"name": "kara", "window": 64}


def test_an_answer_with_marks_that_end_lines_elsewhere(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(server, "chat", "-q", "SAY[a\u2028b\u0085c]") == 0
    assert capsys.readouterr().out == "a\u2028b\u0085c\n"


def test_a_conversation(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"one\n\n{'x' * 900}\ntwo\n"))
    argv = ("chat", "--system-prompt", "be brief", "--max-tokens", "2", "--temperature", "0")
    assert run(server, *argv) == 0
    out, err = capsys.readouterr()
    assert out == "0 1 \n0 1 \n"
    assert err.startswith("error: ") and "context" in err
    assert server.prompts[-1] == "<system>be brief<user>one<assistant>0 1 <user>two<assistant>"


def test_an_answer_that_is_stopped(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("HALF\ntwo\n"))

    def interrupt() -> None:
        wait_until(lambda: bool(server.engine.seen))
        os.kill(os.getpid(), signal.SIGINT)  # which wakes the thread that waits for the answer

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job has none
    try:
        thread.start()
        assert run(server, "chat", "--max-tokens", "100") == 0
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    out, err = capsys.readouterr()
    assert "stopped" in err and out.endswith("99 \n")
    wait_until(lambda: not server.state.generations)
    assert len(server.engine.aborted) == 1
    assert server.prompts[-1] == "<user>two<assistant>"


def test_errors(
    server: RunningServer,
    start_server: StartServer,
    nobody: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.run(["chat", "--url", f"{nobody}/v1", "-q", "a"]) == 1
    assert "--url" in capsys.readouterr().err
    assert cli.run(["chat", "--url", server.url, "-q", "a", "--max-tokens", "1"]) == 0
    assert run(server, "chat", "-q", "a", "--kv-policy", "{") == 1
    assert "--kv-policy" in capsys.readouterr().err
    assert run(server, "complete", "-q", "a", "--model-name", "gpt-9") == 1
    assert "gpt-9" in capsys.readouterr().err
    keyed = start_server(FakeEngine(), api_key=("k",))
    assert run(keyed, "chat", "-q", "a") == 1
    assert "API key" in capsys.readouterr().err
    assert run(keyed, "chat", "-q", "a", "--api-key", "k", "--max-tokens", "1") == 0
    assert run(keyed, "chat", "-q", "DIE", "--api-key", "k") == 1


def test_commands_of_a_conversation(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        *("one", "/nonsense", "//slash", "/clear", "/system be brief", "/policy kara"),
        *("/policy {", "/stats", "two", "/help", "/quit", "never"),
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    assert run(server, "chat", "--max-tokens", "2") == 0
    err = capsys.readouterr().err
    assert "no command /nonsense" in err and "/policy" in err and "not JSON" in err
    assert err.count("policy kara") == 1, "statistics of the last answer alone"
    assert server.prompts == [
        "<user>one<assistant>",
        "<user>one<assistant>0 1 <user>/slash<assistant>",
        "<system>be brief<user>two<assistant>",
    ]
    assert server.params.kv_policy == "kara"


def test_slashes_mean_nothing_to_complete(
    server: RunningServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/quit\nhi\n"))
    assert run(server, "complete", "--max-tokens", "1") == 0
    assert capsys.readouterr().out == "0 \n0 \n"
