"""Work beside the event loop: in threads, in which clients take turns."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeVar

from kvserve.engine.device.pages import resident_bytes, trim_memory
from kvserve.server.state.errors import too_many
from kvserve.turns import Turns

CLIENT: ContextVar[str] = ContextVar("client", default="")
"""Whose request the current task serves."""
LARGE: ContextVar[bool] = ContextVar("large", default=False)
"""Whether the body of the request is so large that nothing may walk it on the event loop."""
_TRIMMED = 2**22
"""Bytes that a thread may leave resident before freed memory is returned to the system."""
_MOST_WAITING = 64
"""Pieces of work of one client that wait; there are more if it sends many requests at once."""
_THREADS = Turns(4, "kvserve-text")
_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work``, which may take long, in a thread, when it is the client's turn.

    If ``work`` leaves much more memory resident, freed memory is returned to the system: malloc
    would keep it for the thread. Raises ``ApiError`` (429) if too much of the client's work waits.
    """

    def run() -> _T:
        before = resident_bytes()
        try:
            return work()
        finally:
            if resident_bytes() - before > _TRIMMED:
                trim_memory()

    client = CLIENT.get()
    if _THREADS.waiting(client) >= _MOST_WAITING:
        raise too_many("too many large requests of yours wait to be read")
    return await asyncio.wrap_future(_THREADS.submit(client, run))


class _TooLongError(BaseException):
    """Nothing in the work takes this for an error of its own."""


def within(seconds: float, work: Callable[[], _T]) -> _T:
    """Run ``work`` in this thread; ``TimeoutError`` if it does not end in time. It is left between
    two instructions of Python's."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), False

    def leave() -> None:
        with lock:
            if not ended:
                raised = ctypes.py_object(_TooLongError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        try:
            return work()
        finally:
            with lock:
                ended = True
            timer.cancel()
    except _TooLongError:
        raise TimeoutError from None


async def beside(work: Callable[[], _T]) -> _T:
    """Run ``work``: in a thread if the request's body is large, else here."""
    return await in_thread(work) if LARGE.get() else work()
