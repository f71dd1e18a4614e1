"""When a sequence is due for compaction, and what an event does to its lengths.

Events are due at logical positions of the sequence itself, so what happens to a sequence depends
neither on its neighbours nor on its chunks or preemptions. The scheduler reads only these objects;
policies (which need tensors) hand them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

NO_EVENT = 2**31 - 1

IntLike = TypeVar("IntLike", int, npt.NDArray[np.int32])


@dataclass(frozen=True)
class Never:
    """The trigger of a policy that never compacts."""

    logs_queries = False

    def next_event(self, num_prompt: int, run_start: int) -> int:
        """Logical position of the next event: none."""
        return NO_EVENT

    def growth(self) -> int:
        """Tokens a sequence is expected to add before it next gives blocks back (0: unknown)."""
        return 0


@dataclass(frozen=True)
class Periodic:
    """Every ``period`` decode steps of the sequence, once ``window`` tokens are uncompressed.

    KvLLM's Algorithm 1 (arXiv 2607.01237), token-granular: the window is anchored at the oldest
    uncompressed token and all pending windows are taken at once. ``keep`` of the first
    ``window - buffer`` tokens survive each window; the ``buffer`` opens the next one.
    """

    window: int
    buffer: int
    keep: int
    period: int
    logs_queries = True

    @property
    def compressible(self) -> int:
        """n: tokens of a window that compete for ``keep`` places."""
        return self.window - self.buffer

    def next_event(self, num_prompt: IntLike, run_start: IntLike) -> IntLike:
        """First logical position, a whole number of periods after the prompt, with a full window.

        ``run_start``, at or after the prompt's end, is the position of the oldest uncompressed
        token. Takes ints or arrays.
        """
        steps = run_start + self.window - num_prompt
        return num_prompt + -(-steps // self.period) * self.period

    def pending_windows(self, run: IntLike) -> IntLike:
        """Windows in ``run >= buffer`` uncompressed tokens; neighbours overlap by the buffer."""
        return (run - self.buffer) // self.compressible

    def growth(self) -> int:
        return self.window


Trigger = Never | Periodic
