"""Tries clients' grammars in another process first, so that a bad one never harms the engine.

That helper reads a grammar per line and forks a child for each, which compiles it, walks a few
steps and exits. The child's stack, memory and time are limited, and none of them is the engine's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from kvserve.engine.sampling.grammar_backends import (
    BackendSource,
    compile_and_try,
    is_backends,
    load_backend,
    refused,
)
from kvserve.log import logger
from kvserve.sampling_params import StructuredOutput
from kvserve.signals import leave_to_parent

_HELPER = "kvserve.engine.sampling.grammar_trial"
_ROOT = str(Path(__file__).parents[3])
"""The folder that has the package."""
_REMEMBERED = 1024
REPLY_SECONDS = 60.0
"""How long the helper may take for a reply: it ends a trial after 20 s itself."""

STACK_BYTES = 2**20
"""An eighth of the stack on which the engine follows a grammar: some 150 levels."""
MEMORY_BYTES = 2**29
"""What one grammar may add to the process."""
CPU_SECONDS, WALL_SECONDS = 1.0, 20.0
_TOO_DEEP = "it is nested too deeply, or its rules refer to one another in too long a chain"
_TOO_SLOW = f"it takes more than {CPU_SECONDS:g} s to compile"
_TOO_LARGE = "it takes too much memory to compile"
_ENDED_BY = {
    signal.SIGSEGV: _TOO_DEEP,
    signal.SIGBUS: _TOO_DEEP,
    signal.SIGPROF: _TOO_SLOW,
    signal.SIGALRM: _TOO_SLOW,
    signal.SIGABRT: _TOO_LARGE,
    signal.SIGKILL: _TOO_LARGE,
}


class GrammarTrial:
    """Knows which grammars are harmless; the helper starts with the first question.

    A grammar that passes on the helper's small stack can be compiled and followed on the engine's,
    which is several times as large. Refusals are remembered, so that a request for 100 choices
    costs one trial.
    """

    def __init__(self, source: BackendSource) -> None:
        self._source = source
        self._process: subprocess.Popen[str] | None = None
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def check(self, wanted: StructuredOutput) -> None:
        """``RequestError`` if the grammar is wrong, or exceeds a limit of the helper."""
        key = hashlib.sha256(f"{wanted.kind}:{wanted.value}".encode()).digest()
        reason = self._reasons.get(key)
        if reason is None:
            reason = self._ask(wanted)
        if not reason:
            return
        self._reasons[key] = reason
        while len(self._reasons) > _REMEMBERED:
            self._reasons.popitem(last=False)
        raise refused(wanted, reason)

    def close(self) -> None:
        """End the helper."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ask(self, wanted: StructuredOutput) -> str:
        """The helper's reply. One that ends, or does not reply, is replaced once: it was killed or
        stopped from outside."""
        for _ in range(2):
            process = self._running()
            assert process.stdin is not None and process.stdout is not None
            late = threading.Timer(REPLY_SECONDS, process.kill)
            late.daemon = True
            late.start()
            try:
                process.stdin.write(json.dumps(asdict(wanted)) + "\n")
                process.stdin.flush()
                reply = process.stdout.readline()
            except OSError:
                reply = ""
            finally:
                late.cancel()
            if reply:
                return str(json.loads(reply))
            logger.error("the process that tries grammars ended (exit code %s)", process.wait())
        raise RuntimeError("the process that tries grammars ended")

    def _running(self) -> subprocess.Popen[str]:
        """The helper, started again if it has ended."""
        if self._process is None or self._process.poll() is not None:
            paths = [_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            environment["TOKENIZERS_PARALLELISM"] = "false"  # no threads: it forks
            described = json.dumps(asdict(self._source))
            self._process = subprocess.Popen(
                [sys.executable, "-m", _HELPER, described],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
        return self._process


# ---- the helper --------------------------------------------------------------------------------


def tried(check: Callable[[], object]) -> str:
    """Run ``check`` in a child within the limits; returns why it failed, or ``""``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            os.write(writing, _complaint_of(check).encode()[:4000])
            os._exit(0)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _ENDED_BY.get(signal.Signals(os.WTERMSIG(status)), "it failed while it was compiled")
    return said if os.WEXITSTATUS(status) == 0 else _TOO_LARGE


def _complaint_of(check: Callable[[], object]) -> str:
    """What ``check`` raises, if anything; a limit that is exceeded ends the process."""
    said = ""

    def run() -> None:
        nonlocal said
        try:
            check()
        except BaseException as error:
            if not is_backends(error):
                raise
            said = str(error) or _TOO_LARGE

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # no /proc, or a lower limit is set already
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)  # what was compiled is freed on its stack, too
    thread.start()
    thread.join()
    return said


def main(described: str) -> None:
    """Answer a line of standard input with why its grammar is refused, "" if it is not; until the
    input ends, which it does with the engine."""
    leave_to_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    source = BackendSource(**json.loads(described))
    compile = load_backend(source)
    for line in sys.stdin:
        wanted = StructuredOutput(**json.loads(line))
        reason = tried(partial(compile_and_try, compile, wanted, source.words))
        print(json.dumps(reason), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
