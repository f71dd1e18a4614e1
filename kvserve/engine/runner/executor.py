"""All ranks of one engine behind one runner: they launch the same steps, and end together."""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunner
from kvserve.engine.runner.plan import EnginePlan
from kvserve.engine.runner.rank import FORGET_SCORES, JOINING, Pool
from kvserve.folders import scratch_folder
from kvserve.late import Late
from kvserve.log import ConfigError, EngineDeadError, logger
from kvserve.scheduler.messages.output import SchedulerOutput

if TYPE_CHECKING:
    from kvserve.engine.runner.rank_process import RankStart

_rank_start = Late("engine.runner.rank_process:RankStart")
_message_for_ranks = Late("engine.runner.rank_process:message_for_ranks")
_EXIT_TIMEOUT_S = 5.0
_LAST_WORDS_S = 1.0


class Executor:
    """The first rank's ``runner``, in this process, and ranks 1 to ``size - 1``, each a process of
    its own. There may be none of these."""

    runner: ModelRunner
    """Given when the ranks have started to ``build`` theirs."""

    def __init__(self, plan: EnginePlan, size: int, attention: str) -> None:
        self._size = size
        self._device = plan.device
        self._group = ALONE
        self._pipes: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = threading.Event()
        self._closing = False
        self._dead = ""
        if size == 1:
            return
        self._directory = scratch_folder()
        self._store = Path(self._directory.name) / "ranks"
        threads, level = torch.get_num_threads(), logger.getEffectiveLevel()
        for rank in range(1, size):
            self._start(_rank_start(plan, rank, size, self._store, attention, threads, level))

    # ---- start -------------------------------------------------------------------------------

    def join(self) -> RankGroup:
        """The group, once every rank has started."""
        if self._size > 1:
            for rank in range(1, self._size):
                answer = self._receive(rank)
                assert answer == JOINING
            self._group = RankGroup.join(0, self._size, self._store, self._device)
        return self._group

    def least_memory(self, own: int) -> int:
        """The fewest bytes that any rank has left once all have loaded their part of the model."""
        return min([own, *(self._receive(rank) for rank in range(1, self._size))])

    def build(self, pool: Pool) -> None:
        """Let the ranks allocate. From then on they send nothing, and a thread watches them."""
        self._tell(pickle.dumps(pool))
        if self._pipes:
            threading.Thread(target=self._watch, name="kvserve-ranks", daemon=True).start()

    # ---- steps -------------------------------------------------------------------------------

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start one step on every rank."""
        self._send(output)
        return self.runner.launch(output)

    def set_policy(self, policy_id: int, policy: Policy) -> None:
        """Let ``Events.policy_id`` mean ``policy`` on every rank; no sequence uses its old one."""
        self._send((policy_id, policy))
        self.runner.policies[policy_id] = policy

    def forget_scores(self) -> None:
        """Give back, on every rank that still runs, what policies kept from event to event."""
        if not self._dead:
            self._send(FORGET_SCORES)
        self.runner.batch.kept_scores.forget()

    def check(self) -> None:
        """``EngineDeadError`` if a rank has ended; it says which one."""
        if self._dead:
            raise EngineDeadError(self._dead)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Kill all other ranks if the step fails or is interrupted: no rank can go on alone.
        ``EngineDeadError`` if one of them was the first to fail."""
        try:
            yield
        except BaseException as error:
            if self._size == 1:
                raise
            unexplained = isinstance(error, Exception) and not isinstance(error, EngineDeadError)
            failed = unexplained and self._ended.wait(2 * _LAST_WORDS_S)
            self._dead = self._dead or f"a step failed: {error!r}"
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
        if self._pipes:
            self._tell(_message_for_ranks(message))

    def close(self) -> None:
        """Ask the ranks to exit, and kill those still there after a few seconds."""
        self._closing = True
        self._dead = self._dead or "the engine was closed"
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
        if self._size > 1:
            self._directory.cleanup()

    def _tell(self, message: bytes) -> None:
        for pipe in self._pipes:
            with suppress(OSError):  # ``_watch`` notices a rank that has ended
                pipe.send_bytes(message)

    def _start(self, start: RankStart) -> None:
        from kvserve.engine.device.child import start_child

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
        self._group.abort()
