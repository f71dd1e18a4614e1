"""Sequences whose grammar is being compiled, and in which order that happens."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

from kvserve.engine.messages import NewSequence
from kvserve.engine.sampling.grammar import GrammarCompiler, Matcher
from kvserve.sampling_params import StructuredOutput


class _Job(NamedTuple):
    wanted: StructuredOutput
    result: Future[Matcher]


class GrammarQueue:
    """A thread compiles, so that no other sequence waits for a grammar.

    It takes one grammar of each client in turn: one that sends many makes the others wait for one.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._thread = ThreadPoolExecutor(1, "kvserve-grammar")
        self._queue: dict[int, tuple[NewSequence, Future[Matcher]]] = {}
        self._jobs: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Each client's grammars, the client whose turn is next first."""

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, new: NewSequence, wanted: StructuredOutput) -> None:
        job = _Job(wanted, Future())
        self._queue[new.seq_id] = new, job.result
        self._jobs.setdefault(new.client, deque()).append(job)
        self._thread.submit(self._compile_next)

    def drop(self, seq_ids: Iterable[int]) -> None:
        for seq_id in seq_ids:
            if seq_id in self._queue:
                self._queue.pop(seq_id)[1].cancel()

    def take(self, timeout: float) -> list[tuple[NewSequence, Future[Matcher]]]:
        """Remove and return the sequences whose grammar is compiled or refused.

        Waits up to ``timeout`` seconds for one of the queued grammars.
        """
        if not self._queue:
            return []
        wait([future for _, future in self._queue.values()], timeout, FIRST_COMPLETED)
        done = [(new, future) for new, future in self._queue.values() if future.done()]
        self.drop([new.seq_id for new, _ in done])
        return done

    def close(self) -> None:
        """Compile no more; who waits gets no answer."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile_next(self) -> None:
        """Compile the next client's next grammar; runs in the thread, once for each job."""
        wanted, result = self._next_job()
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(self._compiler.compile(wanted))
        except BaseException as error:
            result.set_exception(error)

    def _next_job(self) -> _Job:
        client, jobs = next(iter(self._jobs.items()))
        job = jobs.popleft()
        if jobs:
            self._jobs.move_to_end(client)
        else:
            del self._jobs[client]
        return job
