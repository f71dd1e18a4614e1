"""Claude Code and Codex, as npm has them, against a model that says what it is told to.

The template refuses a system turn that is not the first, as those of Qwen 3.5 and later do. Nothing
but the server is asked: their telemetry and their updates are off.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.acceptance.conftest import PYTHON, ROOT
from tests.acceptance.scripted import make_scripted, xml_call
from tests.server.openai.templates import STRICT
from tests.server.real_server import Server

pytestmark = pytest.mark.slow
DONE, RESUMED = "All of it is done, friend.", "It was about nothing much, as before."
QUIET = {
    **{"DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "DISABLE_AUTOUPDATER": "1"},
    **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "ANTHROPIC_AUTH_TOKEN": "none"},
    **{"ANTHROPIC_MODEL": "scripted", "ANTHROPIC_SMALL_FAST_MODEL": "scripted"},
}
CONFIG = """\
model = "{model}"
model_provider = "kvserve"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
analytics.enabled = false
[model_providers.kvserve]
name = "kvserve"
base_url = "{url}/v1"
wire_api = "responses"
[mcp_servers.notes]
command = "{python}"
args = ["{server}"]
"""
NOTES = Path(__file__).parent / "clients" / "notes_server.py"
IN_CATALOGUE = "gpt-6.2-sol"
"""A model that Codex knows: its tools are freeform, in a namespace, and come among the input."""

Agent = Callable[..., str]
Serve = Callable[..., Server]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Serve a model that says these turns, and then that all is done; and count what was asked."""
    running: list[Server] = []

    def start(*turns: str) -> Server:
        language = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
        model = make_scripted(tmp_path / "model", [*turns, DONE, RESUMED], STRICT, language)
        names = ("--served-model-name", "scripted", IN_CATALOGUE)
        size = ("--num-gpu-blocks-override", "9000", "--max-num-batched-tokens", "4096")
        running.append(Server("--model", str(model), *names, *size))
        return running[-1]

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    """Run an agent in a folder and a home of its own; what it says at last."""
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()

    def run(name: str, *arguments: str, **environment: str) -> str:
        program = PYTHON.parents[1] / "node_modules" / ".bin" / name
        if not program.exists():
            pytest.skip(f"{name} is not installed; `make acceptance` installs it by npm")
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        done = subprocess.run(
            [str(program), *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            env={**kept, "HOME": str(home), **environment},
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout.strip()

    return run


def answered(server: Server, route: str) -> int:
    """How many requests of a route were answered; none was refused, and no other was sent."""
    text = server.http.get("/metrics").text
    found = re.findall(
        r'^http_requests_total\{handler="([^"]*)",.*status="(\dxx)"\} (\S+)', text, re.M
    )
    refused = [row for row in found if row[1] in ("4xx", "5xx")]
    assert not refused, (refused, server.text[-3000:])
    return int(sum(float(count) for handler, _, count in found if handler == route))


def test_claude_code(serve: Serve, agent: Agent, tmp_path: Path) -> None:
    """A search for a tool, a tool, a later system turn, and the session once more."""
    file = tmp_path / "written"
    server = serve(
        "I look for it.\n" + xml_call("ToolSearch", query="select:WebFetch"),
        "I write it.\n" + xml_call("Bash", command=f"echo 140.0 > {file}", description="d"),
    )
    more = {**QUIET, "ANTHROPIC_BASE_URL": server.url}
    assert agent("claude", "-p", "Say hi.", "--allowedTools", "Bash", **more) == DONE
    assert file.read_text() == "140.0\n"
    assert answered(server, "/v1/messages") == 3
    assert agent("claude", "-c", "-p", "What was it?", "--allowedTools", "Bash", **more) == RESUMED
    assert answered(server, "/v1/messages") == 4


CODEX: list[tuple[str, Callable[[Path], Sequence[str]]]] = [
    (
        "scripted",
        lambda file: (
            "I read it.\n" + xml_call("mcp__notes__read_note", title="12345"),
            "I write it.\n" + xml_call("exec_command", cmd=f"echo hi > {file}"),
        ),
    ),
    (
        IN_CATALOGUE,
        lambda file: (
            "I do both.\n"
            + xml_call(
                "functions__exec",
                input=f'text(await tools.exec_command({{"cmd": "echo hi > {file}"}}));\n'
                'text(await tools.mcp__notes__read_note({title: "12345"}));',
            ),
        ),
    ),
]


@pytest.mark.parametrize(("model", "script"), CODEX)
def test_codex(
    serve: Serve, agent: Agent, tmp_path: Path, model: str, script: Callable[[Path], Sequence[str]]
) -> None:
    """A tool of an MCP server, a command, and the session once more."""
    file, home = tmp_path / "written", tmp_path / "codex"
    turns = script(file)
    server = serve(*turns)
    home.mkdir()
    config = CONFIG.format(model=model, url=server.url, python=sys.executable, server=NOTES)
    (home / "config.toml").write_text(config)
    run = ("exec", "--skip-git-repo-check", "--json")
    said = agent("codex", *run, "Say hi.", CODEX_HOME=str(home))
    assert DONE in said and "The note '12345' is empty." in said
    assert file.read_text() == "hi\n"
    assert answered(server, "/v1/responses") == len(turns) + 1
    assert RESUMED in agent("codex", *run, "resume", "--last", "What?", CODEX_HOME=str(home))
    assert answered(server, "/v1/responses") == len(turns) + 2
