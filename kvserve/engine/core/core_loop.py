"""The loop that runs an engine core on commands from another thread or process, and the thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvserve.config import EngineConfig
from kvserve.engine.core.pool_watch import PoolWatch
from kvserve.engine.device.pages import KeptMemory
from kvserve.engine.messages import (
    INTERNAL_ERROR,
    Branches,
    EngineInfo,
    FinishedSequence,
    NewSequence,
    RefusedSequence,
    StepOutputs,
)
from kvserve.log import EngineDeadError, RequestError, logger
from kvserve.sampling_params import StructuredOutput
from kvserve.turns import Turns

if TYPE_CHECKING:
    from kvserve.engine.core.engine_core import EngineCore
    from kvserve.engine.sampling.grammar import GrammarCompiler
    from kvserve.engine.sampling.grammar_backends import Matcher
    from kvserve.late import Made

_IDLE_POLL_S = 0.5
_IDLE_S = 0.02
"""Seconds that the loop waits for a grammar, without reading commands, while no step runs."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences."""

    seq_ids: list[int]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget the cached blocks."""


@dataclass(frozen=True, slots=True)
class WatchPool:
    """Start or stop sending views of the pool."""

    on: bool


@dataclass(frozen=True, slots=True)
class MakeOffers:
    """Say what requests may choose as ``kv_policy``."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Sequences whose message could not be decoded."""

    seq_ids: list[int]
    reason: str


Command = Branches | Abort | ResetPrefixCache | WatchPool | MakeOffers | Stop | Unreadable


OnOutputs = Callable[[StepOutputs], None]
OnDeath = Callable[[BaseException], None]


class ThreadClient:
    """The core in a thread of this process. It shares the interpreter lock with its client, which
    costs a fifth of the throughput, so servers take a process (``core_process``).

    Callbacks run in the event loop that called ``start``."""

    suspended = False
    stage = "loading torch"

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    async def start(self, on_outputs: OnOutputs, on_death: OnDeath) -> EngineInfo:
        loop = asyncio.get_running_loop()
        built: asyncio.Future[EngineInfo] = loop.create_future()

        def call(function: Callable[[Any], None], argument: Any) -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(function, argument)

        def settle(result: EngineInfo | BaseException) -> None:
            if built.done():  # the caller has gone
                return
            if isinstance(result, EngineInfo):
                built.set_result(result)
            else:
                built.set_exception(result)

        def run() -> None:
            try:
                core = self._load()
                call(settle, core.described())
            except BaseException as error:
                return call(settle, error)
            try:
                with closing(core):
                    run_core(core, self._receive, partial(call, on_outputs))
            except Exception as error:
                logger.exception("the engine failed")
                call(on_death, EngineDeadError(f"the engine failed: {error}"))

        self._thread = threading.Thread(target=run, name="kvserve-engine", daemon=True)
        self._thread.start()
        try:
            return await built
        except BaseException:
            await self.stop()  # it loads to the end, and is closed at once
            raise

    def _load(self) -> EngineCore:
        return serving_core(self._config, partial(setattr, self, "stage"))

    def send(self, command: Command) -> None:
        self._commands.put(command)

    async def stop(self) -> None:
        self._commands.put(Stop())
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    def _receive(self, block: bool) -> Iterable[Command]:
        with suppress(queue.Empty):
            while True:
                yield self._commands.get(block, timeout=_IDLE_POLL_S)
                block = False


def serving_core(config: EngineConfig, tell: Callable[[str], None]) -> EngineCore:
    """A core that has run an event of its policy once, on no entry: no request waits until what
    events need is loaded, and compiled. (On a GPU all ranks do so as they start.)"""
    from kvserve.engine.core.engine_core import EngineCore
    from kvserve.scheduler.triggers.trigger import Never

    core = EngineCore(config, tell=tell)
    runner, policy = core.runner, core.runner.policies[0]
    here = runner.batch.device == "cpu" and runner.group.size == 1
    if here and not isinstance(policy.event_trigger, Never):
        from kvserve.engine.runner.warm_up import rehearse_event

        rehearse_event(runner, policy, core.info.max_model_len, events=1)
        core.scheduler.events.of_steps().handler(policy.demands.event_kind)
    return core


def run_core(
    core: EngineCore,
    receive: Callable[[bool], Iterable[Command]],
    send: Callable[[StepOutputs], None],
) -> None:
    """Serve commands and run steps until told to stop.

    ``receive`` returns all queued commands; if its argument is true, it waits a while for one.
    """
    send(StepOutputs(stats=core.stats()))  # the pool, before the first step
    pool, kept, grammars = PoolWatch(core), KeptMemory(), GrammarQueue(core.grammars)
    refused: list[RefusedSequence] = []

    def add(new: NewSequence, compiled: Future[Matcher] | None = None) -> None:
        try:
            core.add(new, None if compiled is None else compiled.result())
        except RequestError as error:
            refused.append(RefusedSequence(new.seq_id, str(error), error.param, error.code))
        except Exception as error:
            logger.error("request %s could not be admitted", new.request_id, exc_info=error)
            refused.append(RefusedSequence(new.seq_id, INTERNAL_ERROR, None, "internal_error"))

    with closing(grammars):
        while True:
            core.executor.check()
            ended: list[FinishedSequence] = []
            reset = False
            refused.clear()
            if not core.has_work and core.grammars.made is not None:
                core.grammars.made.tidy()
            busy = core.has_work or bool(grammars)
            commands = list(receive(not busy))
            if not (busy or commands):
                kept.give_back()
            for command in commands:
                if isinstance(command, Stop):
                    return
                if isinstance(command, Abort):
                    grammars.drop(command.seq_ids)
                    ended += core.abort(command.seq_ids)
                elif isinstance(command, ResetPrefixCache):
                    core.reset_prefix_cache()
                    reset = True
                elif isinstance(command, WatchPool):
                    pool.switch(command.on)
                elif isinstance(command, MakeOffers):
                    send(StepOutputs(offers=core.offers()))
                elif isinstance(command, Unreadable):
                    message = f"the engine could not read the request: {command.reason}"
                    for seq_id in command.seq_ids:
                        refused.append(RefusedSequence(seq_id, message, None, "internal_error"))
                else:
                    for new in command.each():
                        if new.structured_output is not None:
                            grammars.add(new, new.structured_output)
                        else:
                            add(new)
            for new, compiled in grammars.take(0 if core.has_work else _IDLE_S):
                add(new, compiled)
            if refused or ended or reset:
                send(StepOutputs(finished=ended, refused=list(refused), stats=core.stats()))
            if core.has_work:
                send(core.step())
            if pool.due:
                send(StepOutputs(pool=pool.view()))


class GrammarQueue:
    """A thread compiles, so that no other sequence waits for a grammar.

    It takes one grammar of each client in turn: one that sends many makes the others wait for one.
    """

    def __init__(self, compiler: Made[GrammarCompiler]) -> None:
        self._compiler = compiler
        self._turns = Turns(1, "kvserve-grammar")
        self._queue: dict[int, tuple[NewSequence, Future[Matcher]]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, new: NewSequence, wanted: StructuredOutput) -> None:
        compiled = self._turns.submit(new.client, partial(self._compiler().compile, wanted))
        self._queue[new.seq_id] = new, compiled

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
        self._turns.close()
