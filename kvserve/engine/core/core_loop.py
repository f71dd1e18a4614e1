"""The loop that runs an engine core on commands from another thread or process."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from kvserve.engine.core.engine_core import INTERNAL_ERROR, EngineCore
from kvserve.engine.core.grammar_queue import GrammarQueue
from kvserve.engine.core.pool_watch import PoolWatch
from kvserve.engine.device.pages import KeptMemory
from kvserve.engine.messages import (
    Branches,
    FinishedSequence,
    NewSequence,
    RefusedSequence,
    StepOutputs,
)
from kvserve.engine.sampling.grammar import Matcher
from kvserve.log import RequestError, logger

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
class Stop:
    """Leave the loop."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Sequences whose message could not be decoded."""

    seq_ids: list[int]
    reason: str


Command = Branches | Abort | ResetPrefixCache | WatchPool | Stop | Unreadable


class Channel(Protocol):
    """Commands in, outputs out."""

    def receive(self, block: bool) -> Iterable[Command]:
        """All queued commands; with ``block``, waits a while for the first one."""
        ...

    def send(self, outputs: StepOutputs) -> None: ...


def run_core(core: EngineCore, channel: Channel) -> None:
    """Serve commands and run steps until told to stop."""
    with closing(GrammarQueue(core.grammars)) as grammars:
        _serve(core, channel, grammars)


def _serve(core: EngineCore, channel: Channel, grammars: GrammarQueue) -> None:
    channel.send(StepOutputs(stats=core.stats()))  # the pool, before the first step
    pool, kept = PoolWatch(core), KeptMemory()
    refused: list[RefusedSequence] = []

    def add(new: NewSequence, compiled: Future[Matcher] | None = None) -> None:
        try:
            core.add(new, None if compiled is None else compiled.result())
        except RequestError as error:
            refused.append(RefusedSequence(new.seq_id, str(error), error.param, error.code))
        except Exception as error:
            logger.error("request %s could not be admitted", new.request_id, exc_info=error)
            refused.append(RefusedSequence(new.seq_id, INTERNAL_ERROR, None, "internal_error"))

    while True:
        core.check()
        ended: list[FinishedSequence] = []
        reset = False
        refused.clear()
        if not core.has_work:
            core.grammars.tidy()
        busy = core.has_work or bool(grammars)
        commands = list(channel.receive(block=not busy))
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
                pool.on = command.on
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
            channel.send(StepOutputs(finished=ended, refused=list(refused), stats=core.stats()))
        if core.has_work:
            channel.send(core.step())
        if pool.due:
            channel.send(StepOutputs(pool=pool.view()))
