"""Threads for work that takes long: clients take turns, and none has all of the threads."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

_T = TypeVar("_T")
_Job = tuple[Callable[[], Any], "Future[Any]"]


class Turns:
    """``workers`` threads. A client has one of them less, if there are several."""

    def __init__(self, workers: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(workers, name)
        self._each = max(workers - 1, 1)
        self._lock = threading.Lock()
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        """Each client's work, the client whose turn is next first."""
        self._running: Counter[str] = Counter()

    def waiting(self, client: str) -> int:
        """How much work of the client has not begun."""
        with self._lock:
            return len(self._queues.get(client, ()))

    def submit(self, client: str, work: Callable[[], _T]) -> Future[_T]:
        """Run ``work`` in the client's turn; a future that is cancelled before is passed over."""
        result: Future[_T] = Future()
        with self._lock:
            self._queues.setdefault(client, deque()).append((work, result))
        self._threads.submit(self._run)
        return result

    def close(self) -> None:
        """Begin nothing more; who waits gets no answer."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        """Work until it is nobody's turn: what one thread had to leave another goes on with."""
        while (taken := self._take()) is not None:
            client, (work, result) = taken
            try:
                if result.set_running_or_notify_cancel():
                    result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
            finally:
                with self._lock:
                    self._running[client] -= 1

    def _take(self) -> tuple[str, _Job] | None:
        with self._lock:
            ready = (c for c in self._queues if self._running[c] < self._each)
            client = next(ready, None)
            if client is None:
                return None
            queue = self._queues[client]
            job = queue.popleft()
            self._queues.move_to_end(client)
            if not queue:
                del self._queues[client]
            self._running[client] += 1
            return client, job
