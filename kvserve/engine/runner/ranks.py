"""Several ranks of one engine: they launch the same steps, and end together."""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from kvserve.engine.device.child import start_child
from kvserve.engine.device.distributed import RankGroup
from kvserve.engine.device.shared_group import SharedGroup
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.executor import Executor
from kvserve.engine.runner.model_runner import LaunchedStep
from kvserve.engine.runner.plan import EnginePlan
from kvserve.engine.runner.rank import Pool
from kvserve.engine.runner.rank_process import FORGET_SCORES, JOINING, RankStart, message_for_ranks
from kvserve.folders import scratch_folder
from kvserve.log import ConfigError, EngineDeadError, logger
from kvserve.scheduler.messages.output import SchedulerOutput

_EXIT_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0


class Ranks(Executor):
    """And ranks 1 to ``size - 1``, each a process of its own."""

    def __init__(self, plan: EnginePlan, size: int, attention: str) -> None:
        super().__init__()
        self._size = size
        self._device = plan.device
        self._group: SharedGroup | None = None
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._closing = False
        self._directory = scratch_folder()
        self._store = Path(self._directory.name) / "ranks"
        threads, level = torch.get_num_threads(), logger.getEffectiveLevel()
        for rank in range(1, size):
            self._start(RankStart(plan, rank, size, self._store, attention, threads, level))

    # ---- start -------------------------------------------------------------------------------

    def join(self) -> RankGroup:
        for rank in range(1, self._size):
            answer = self._receive(rank)
            assert answer == JOINING
        self._group = SharedGroup.join(0, self._size, self._store, self._device)
        return self._group

    def least_memory(self, own: int) -> int:
        return min([own, *(self._receive(rank) for rank in range(1, self._size))])

    def build(self, pool: Pool) -> None:
        """Let the ranks allocate. From then on they send nothing, and a thread watches them."""
        self._tell(pickle.dumps(pool))
        threading.Thread(target=self._watch, name="kvserve-ranks", daemon=True).start()

    # ---- steps -------------------------------------------------------------------------------

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        self._send(output)
        return super().launch(output)

    def set_policy(self, policy_id: int, policy: Policy) -> None:
        self._send((policy_id, policy))
        super().set_policy(policy_id, policy)

    def forget_scores(self) -> None:
        if not self._dead:
            self._send(FORGET_SCORES)
        super().forget_scores()

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            unexplained = isinstance(error, Exception) and not isinstance(error, EngineDeadError)
            failed = unexplained and self._ended.wait(2 * _LAST_WORDS_S)
            self._dead = self._dead or f"a step failed: {error!r}"
            if self._group is not None:
                self._group.abort()
            self._closing = True
            for process in self._processes:
                process.kill()  # it may be waiting for this rank, and would read no message
            self.close()
            if failed:
                raise EngineDeadError(self._dead) from error
            raise

    def _send(self, message: SchedulerOutput | tuple[int, Policy] | str) -> None:
        """Send the same message to all other ranks; ``EngineDeadError`` if one has ended."""
        self.check()
        self._tell(message_for_ranks(message))

    def close(self) -> None:
        """Ask the ranks to exit, and kill those still there after a few seconds."""
        super().close()
        self._closing = True
        self._tell(pickle.dumps(None))
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        self._directory.cleanup()

    def _tell(self, message: bytes) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # ``_watch`` notices a rank that has ended
                pipe.send_bytes(message)

    def _start(self, start: RankStart) -> None:
        process, pipe = start_child("kvserve.engine.runner.rank_process")
        self._processes.append(process)
        self._pipes.append(pipe)
        with suppress(OSError):
            pipe.send(start)

    def _receive(self, rank: int) -> Any:
        try:
            answer = self._pipes[rank - 1].recv()
        except (EOFError, OSError):
            code = self._processes[rank - 1].wait()
            raise ConfigError(
                f"--tensor-parallel-size: rank {rank} ended while it started (exit code {code}); "
                "see its log"
            ) from None
        if isinstance(answer, ConfigError):
            raise answer
        return answer

    def _watch(self) -> None:
        """Wait for the first rank to end, then abort the group: NCCL would go on waiting for it."""
        rank = self._pipes.index(wait(self._pipes)[0]) + 1  # type: ignore[arg-type]
        if self._closing:
            return
        code: int | str = "unknown"
        with suppress(subprocess.TimeoutExpired):
            code = self._processes[rank - 1].wait(_LAST_WORDS_S)
        self._dead = f"tensor-parallel rank {rank} ended (exit code {code}); see its log"
        self._ended.set()
        assert self._group is not None, "it is watched from then on"
        self._group.abort()
