"""The ranks of one engine behind one runner. There may be others (``ranks.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvserve.engine.device.distributed import ALONE, RankGroup
from kvserve.engine.policies.base import Policy
from kvserve.engine.runner.model_runner import LaunchedStep, ModelRunner
from kvserve.engine.runner.rank import Pool
from kvserve.log import EngineDeadError
from kvserve.scheduler.messages.output import SchedulerOutput


class Executor:
    """The ``runner`` of the first rank, in this process."""

    runner: ModelRunner
    """Given when the ranks have started to ``build`` theirs."""

    def __init__(self) -> None:
        self._dead = ""

    # ---- start -------------------------------------------------------------------------------

    def join(self) -> RankGroup:
        """The group, once every rank has started."""
        return ALONE

    def least_memory(self, own: int) -> int:
        """The fewest bytes that any rank has left once all have loaded their part of the model."""
        return own

    def build(self, pool: Pool) -> None:
        """Let the other ranks allocate."""

    # ---- steps -------------------------------------------------------------------------------

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start one step on every rank."""
        self.check()
        return self.runner.launch(output)

    def set_policy(self, policy_id: int, policy: Policy) -> None:
        """Let ``Events.policy_id`` mean ``policy`` on every rank; no sequence uses its old one."""
        self.runner.policies[policy_id] = policy

    def forget_scores(self) -> None:
        """Give back, on every rank that still runs, what policies kept from event to event."""
        if self.runner.batch.kept_scores.made is not None:
            self.runner.batch.kept_scores.made.forget()

    def check(self) -> None:
        """``EngineDeadError`` if a rank has ended; it says which one."""
        if self._dead:
            raise EngineDeadError(self._dead)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Kill all other ranks if the step fails or is interrupted: no rank can go on alone.
        ``EngineDeadError`` if one of them was the first to fail."""
        yield

    def close(self) -> None:
        """End the other ranks."""
        self._dead = self._dead or "the engine was closed"
