"""How far one has to walk: functions and files that a journey through the package enters.

    python -m bench.walks            # the three journeys
    python -m bench.walks --list     # and which functions, by file, with their callers
    python -m bench.walks --imports  # files and lines that one short answer imports (--list: which)

- *step*: a decoding step of one row that does nothing else.
- *event*: what the step of an eviction enters besides.
- *max_chunk*: the functions that are given ``--policy.max_chunk`` in some form, from argv to the
  kernel that needs it: as text, as a key, as a number of that name, or as the policy that has it.

Counted by ``sys.setprofile``: Python functions of kvserve, properties included, comprehensions and
what dataclasses generate aside. A jump is a call into another file.

What an answer imports is counted in a fresh process on the CPU, by ``sys.modules``:
``tests/import_budget.json`` bounds it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kvserve
from kvserve.config import CompressionConfig, EngineConfig
from kvserve.engine.policies.base import Policy
from kvserve.log import say
from kvserve.sampling_params import SamplingParams

ROOT = str(Path(kvserve.__file__).parent)
FIELD = "max_chunk"
ARGV = (
    *("--model", "kvserve/tiny", "--policy", "kara", "--policy.window", "128"),
    *("--policy.buffer", "16", "--policy.chunk_budget", "16"),
    *(f"--policy.{FIELD}", "6", "--kv-cache-memory", "64MiB"),
)
PROMPT, ANSWER = 40, 700
IMPORTING = ("none", "kara")
"""Policies behind which imports are counted."""
_ANSWER = """
import sys
from kvserve import LLM, SamplingParams
llm = LLM("kvserve/tiny", policy=sys.argv[1], device="cpu")
llm.generate("Hello", SamplingParams(max_tokens=8), use_tqdm=False)
files = {getattr(module, "__file__", None) for module in sys.modules.values()}
print(*sorted(file for file in files if file and file.startswith(sys.argv[2])), sep="\\n")
"""


class Walk:
    """The functions entered inside of ``with``, each with its callers; and the jumps."""

    def __init__(self, enters: Callable[[FrameType], bool] = lambda frame: True) -> None:
        self.callers: dict[CodeType, set[CodeType | None]] = defaultdict(set)
        self.jumps = self.calls = 0
        self._enters = enters

    def __enter__(self) -> Walk:
        sys.setprofile(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not _is_ours(code) or not self._enters(frame):
            return
        caller = frame.f_back
        while caller is not None and not _is_ours(caller.f_code):
            caller = caller.f_back
        self.callers[code].add(None if caller is None else caller.f_code)
        self.calls += 1
        self.jumps += caller is None or caller.f_code.co_filename != code.co_filename

    def without(self, other: Walk) -> Walk:
        """What ``other`` has not entered."""
        walk = Walk()
        walk.calls, walk.jumps = self.calls, self.jumps
        for code in self.callers.keys() - other.callers.keys():
            walk.callers[code] = self.callers[code]
        return walk

    def say(self, name: str, *, each: bool) -> None:
        by_file: dict[str, list[CodeType]] = defaultdict(list)
        for code in self.callers:
            by_file[code.co_filename.removeprefix(ROOT + "/")].append(code)
        jumps = f", {self.jumps} of {self.calls} calls into another file"
        say(f"{name}: {len(self.callers)} functions of {len(by_file)} files{jumps}\n")
        for file, codes in sorted(by_file.items()) if each else ():
            say(f"  {file}\n")
            for code in sorted(codes, key=lambda code: code.co_firstlineno):
                callers = sorted({_name(caller) for caller in self.callers[code]})
                say(f"    {_name(code)}  <- {', '.join(callers)}\n")


def _name(code: CodeType | None) -> str:
    return "-" if code is None else getattr(code, "co_qualname", code.co_name)  # from 3.11 on


def _is_ours(code: CodeType) -> bool:
    generated = code.co_name.startswith("<") and code.co_name != "<lambda>"
    return code.co_filename.startswith(ROOT) and not generated


def _carries(value: Any, depth: int = 3) -> bool:
    """Whether ``value`` has the field in it: as text, as a key, or as a policy that has it."""
    if isinstance(value, str):
        return FIELD in value
    if depth and isinstance(value, Mapping):
        return any(_carries(key) or _carries(item, depth - 1) for key, item in value.items())
    if depth and isinstance(value, list | tuple):
        return any(_carries(item, depth - 1) for item in value)
    if isinstance(value, argparse.Namespace | EngineConfig | CompressionConfig):
        return _carries(vars(value), depth)
    return isinstance(value, Policy) and hasattr(value, FIELD)


def _is_given(frame: FrameType) -> bool:
    return any(name == FIELD or _carries(value) for name, value in frame.f_locals.items())


def walk_from_argv() -> tuple[EngineConfig, Walk]:
    """Read the command line: the engine's settings, and where the field came by."""
    from kvserve.server.cli.commands import parser_of
    from kvserve.server.settings.reading import read_settings

    with Walk(_is_given) as walk:
        config, _ = read_settings(parser_of("serve").parse(ARGV))
    return config, walk


def imported_lines(policy: str) -> dict[str, int]:
    """The package's files that one short answer under ``policy`` imports, and their lines."""
    command = [sys.executable, "-c", _ANSWER, policy, ROOT + "/"]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return {
        file.removeprefix(ROOT + "/"): len(Path(file).read_text().splitlines()) for file in found
    }


def say_imports(*, each: bool) -> None:
    for policy in IMPORTING:
        lines = imported_lines(policy)
        say(f"{policy}: {len(lines)} files, {sum(lines.values())} lines\n")
        for file, count in lines.items() if each else ():
            say(f"  {count:4} {file}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print every function, or file")
    parser.add_argument("--imports", action="store_true", help="count what an answer imports")
    args = parser.parse_args()
    if args.imports:
        say_imports(each=args.list)
    else:
        say_walks(each=args.list)


def say_walks(*, each: bool) -> None:
    from kvserve.engine.frontend.llm_engine import LLMEngine

    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    prompt = list(range(5, 5 + PROMPT))
    config, carried = walk_from_argv()
    with carried:
        engine = LLMEngine(config)
        engine.add_request("carry", prompt, params)
        while not engine.core.scheduler.totals.compactions_total:
            engine.step()
    engine = LLMEngine(config)
    engine.core._stats_due = float("inf")  # a slow machine would send statistics in every step
    engine.add_request("walk", prompt, params)
    plain, eventful = list[Walk](), list[Walk]()
    for _ in range(ANSWER - 1):  # the last step ends the sequence
        counted, before = Walk(), engine.core.scheduler.totals.compactions_total
        with counted:
            engine.step()
        had_event = engine.core.scheduler.totals.compactions_total > before
        (eventful if had_event else plain).append(counted)
    # The first steps prefill and record.
    step = min(plain[4:], key=lambda walk: len(walk.callers))
    step.say("step", each=each)
    min(eventful, key=lambda walk: len(walk.callers)).without(step).say("event", each=each)
    carried.say("max_chunk", each=each)


if __name__ == "__main__":
    main()
