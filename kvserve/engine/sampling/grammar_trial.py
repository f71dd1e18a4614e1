"""Tries a grammar in the helper process before the engine compiles it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from dataclasses import asdict
from pathlib import Path

from kvserve.engine.sampling.grammar_backends import BackendSource, refused
from kvserve.log import logger
from kvserve.sampling_params import StructuredOutput

_HELPER = "kvserve.engine.sampling.grammar_helper"
_ROOT = str(Path(__file__).parents[3])
"""The folder that has the package."""
_REMEMBERED = 1024
REPLY_SECONDS = 60.0
"""How long the helper may take for a reply: it ends a trial after 20 s itself."""


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
