"""The process that tries clients' grammars first, so that a bad one never harms the engine.

It reads a grammar per line and forks a child for each, which compiles it, walks a few steps and
exits. The child's stack, memory and time are limited, and none of them is the engine's.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from kvserve.engine.sampling.grammar_backends import (
    BackendSource,
    Compile,
    compile_and_try,
    is_backends,
    load_backend,
)
from kvserve.sampling_params import StructuredOutput

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


def tried(check: Callable[[], None]) -> str:
    """Run ``check`` in a child within the limits; returns why it failed, or ``""``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.close(reading)
            os.write(writing, _limited(check).encode()[:4000])
            os._exit(0)
        os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return _ENDED_BY.get(signal.Signals(os.WTERMSIG(status)), "it failed while it was compiled")
    return said if os.WEXITSTATUS(status) == 0 else _TOO_LARGE


def _limited(check: Callable[[], None]) -> str:
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


def answer(line: str, compile: Compile, words: int) -> str:
    """The reply to a line of input: why the grammar is refused as JSON, ``""`` if it is not."""
    wanted = StructuredOutput(**json.loads(line))

    def check() -> None:
        compile_and_try(compile, wanted, words)

    return json.dumps(tried(check))


def main(described: str) -> None:
    """Serve standard input until it ends, which it does with the engine."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no reply
    source = BackendSource(**json.loads(described))
    compile = load_backend(source)
    for line in sys.stdin:
        print(answer(line, compile, source.words), file=replies, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
