"""Runs an engine core in a thread or a process, so that the caller's event loop stays free.

A thread shares the interpreter lock with its client, which costs a fifth of the throughput. So the
server uses the process; tests and notebooks may use the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvserve.config import EngineConfig
from kvserve.engine.core.core_loop import Command, Stop, run_core
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.messages import EngineInfo, StepOutputs
from kvserve.log import EngineDeadError, logger

if TYPE_CHECKING:
    from kvserve.engine.core.core_process import ParentLink

_IDLE_POLL_S = 0.5

T = TypeVar("T")
OnOutputs = Callable[[StepOutputs], None]
OnDeath = Callable[[BaseException], None]


class EngineClient(Protocol):
    """A core that runs elsewhere. The callbacks run in the event loop that called ``start``."""

    @property
    def suspended(self) -> bool: ...

    async def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> EngineInfo: ...

    def send(self, command: Command) -> None: ...

    async def stop(self) -> None: ...


class ThreadClient:
    """The core in a thread of this process."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def suspended(self) -> bool:
        return False

    async def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> EngineInfo:
        loop = asyncio.get_running_loop()
        core = await asyncio.to_thread(EngineCore, self._config)

        def run() -> None:
            try:
                with contextlib.closing(core):
                    run_core(core, _QueueChannel(self._commands, loop, on_outputs))
            except Exception as error:
                logger.exception("the engine failed")
                _call(loop, on_death, EngineDeadError(f"the engine failed: {error}"))

        self._thread = threading.Thread(target=run, name="kvserve-engine", daemon=True)
        self._thread.start()
        return core.info

    def send(self, command: Command) -> None:
        self._commands.put(command)

    async def stop(self) -> None:
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)


class _QueueChannel:
    def __init__(
        self,
        commands: queue.SimpleQueue[Command],
        loop: asyncio.AbstractEventLoop,
        on_outputs: OnOutputs,
    ) -> None:
        self._commands = commands
        self._loop = loop
        self._on_outputs = on_outputs

    def receive(self, block: bool) -> Iterable[Command]:
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._commands.get(block, timeout=_IDLE_POLL_S)
                block = False

    def send(self, outputs: StepOutputs) -> None:
        _call(self._loop, self._on_outputs, outputs)


class ProcessClient:
    """The core in a process of its own; see ``core_process`` for the other end."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._link: ParentLink | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def suspended(self) -> bool:
        return self._link is not None and self._link.suspended

    async def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> EngineInfo:
        from kvserve.engine.core.core_process import ParentLink

        self._link = ParentLink(self._config)
        info = await self._link.wait_until_ready()
        self._reader = asyncio.create_task(self._read(self._link, on_outputs, on_death))
        return info

    def send(self, command: Command) -> None:
        assert self._link is not None, "not started"
        self._link.send(command)

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._link is not None:
            await self._link.close()

    async def _read(self, link: ParentLink, on_outputs: OnOutputs, on_death: OnDeath) -> None:
        try:
            while True:
                on_outputs(await link.receive())
        except EngineDeadError as error:
            on_death(error)
        except Exception as error:  # else open requests would wait forever
            logger.exception("the engine's answers cannot be read")
            on_death(EngineDeadError(f"its answers cannot be read: {error}"))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[T], None], argument: T) -> None:
    """Run a callback in the loop, unless the loop has been closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)
