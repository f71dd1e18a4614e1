"""The loop around an engine core that takes commands from elsewhere: a thread's or a process's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvserve.engine.core import EngineCore
from kvserve.engine.messages import FinishedSequence, NewSequence, RefusedSequence, StepOutputs
from kvserve.log import RequestError


@dataclass(frozen=True, slots=True)
class Abort:
    """End these sequences."""

    seq_ids: list[int]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget the cached blocks."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


Command = NewSequence | Abort | ResetPrefixCache | Stop


class Channel(Protocol):
    """Commands in, outputs out."""

    def receive(self, block: bool) -> Iterable[Command]:
        """All commands that wait; with ``block``, at least one (or none after a while)."""
        ...

    def send(self, outputs: StepOutputs) -> None: ...


def run_core(core: EngineCore, channel: Channel) -> None:
    """Serve commands and run steps until told to stop."""
    while True:
        core.check()
        refused: list[RefusedSequence] = []
        ended: list[FinishedSequence] = []
        reset = False
        for command in channel.receive(block=not core.has_work):
            if isinstance(command, Stop):
                return
            if isinstance(command, Abort):
                ended += core.abort(command.seq_ids)
                continue
            if isinstance(command, ResetPrefixCache):
                core.reset_prefix_cache()
                reset = True
                continue
            try:
                core.add(command)
            except RequestError as error:
                refused.append(RefusedSequence(command.seq_id, str(error), error.param, error.code))
        if refused or ended or reset:
            channel.send(StepOutputs(finished=ended, refused=refused, stats=core.stats()))
        if core.has_work:
            channel.send(core.step())
