"""When compressing generated text pays: a full pool in steady state, without a scheduler.

A step of B sequences that hold c entries each takes ``max(T_w, B t_c) + kappa B c + t_0``. B is how
many fit into the pool, up to the limit on running sequences. With fewer entries each, more
sequences fit; events cost time in return.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

import numpy as np

from kvserve.benchmarks.simulator.cost_model import CostModel, Queries
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.periodic import Periodic


@dataclass(frozen=True)
class BreakEven:
    """Steady states without (0) and with (1) compression: sequences, and seconds of a step.

    ``saved_s``: the time that ``sequences_0`` save per step because they read fewer entries; if the
    pool limits them, the time that the freed room is worth. ``paid_s``: the time that the events of
    as many sequences add to a step.
    """

    sequences_0: float
    sequences_1: float
    step_0_s: float
    step_1_s: float
    saved_s: float
    paid_s: float
    memory_bound: bool

    @property
    def pays(self) -> bool:
        return self.saved_s > self.paid_s

    @property
    def gain(self) -> float:
        """Throughput with compression over throughput without it."""
        return self.sequences_1 / self.step_1_s / (self.sequences_0 / self.step_0_s)


def break_even(
    cost: CostModel,
    pool_tokens: float,
    max_sequences: int,
    held_0: float,
    held_1: float,
    event_s_per_token: float,
    windows_per_token: float = 0.0,
) -> BreakEven:
    """``held_0`` and ``held_1``: mean entries per sequence while it decodes, those of layers with
    windows aside. Events take ``event_s_per_token`` for each generated token, and a fixed time in
    each step that has any."""
    held_0, held_1 = held_0 + cost.window_entries, held_1 + cost.window_entries

    def state(held: float) -> tuple[float, float]:
        sequences = min(max_sequences, pool_tokens / held)
        tokens = max(cost.weights_s, sequences * cost.token_s)
        overhead = cost.device.step_overhead
        return sequences, tokens + sequences * held * cost.entry_s + overhead

    def events(sequences: float) -> float:
        some = 1 - exp(-sequences * windows_per_token)
        return sequences * event_s_per_token + some * cost.device.event_overhead

    (before, step_0), (after, step_1) = state(held_0), state(held_1)
    memory_bound = pool_tokens / held_0 < max_sequences
    less = 1 - held_1 / held_0
    saved = step_0 * less if memory_bound else before * held_0 * cost.entry_s * less
    return BreakEven(
        before, after, step_0, step_1 + events(after), saved, events(before), memory_bound
    )


def mean_held(prompts: IntArray, outputs: IntArray, trigger: Periodic | None, log: float) -> float:
    """Entries a sequence holds, on average over all decode steps of requests ``[n]``.

    An event keeps the buffer whole, and the next one comes up to a window and a period later.
    ``log``: the size of a logged query, in entries. Without a trigger nothing is evicted.
    """
    prompts, outputs = prompts.astype(float), outputs.astype(float)
    if trigger is None:
        entries = outputs**2 / 2
    else:
        run = trigger.buffer + trigger.compressible / 2 + trigger.period / 2
        recent = np.where(outputs < run, outputs**2 / 2, run * (outputs - run / 2))
        older = np.maximum(outputs - run, 0) ** 2 / 2
        entries = recent * (1 + log) + older * trigger.keep / trigger.compressible
    return float((prompts * outputs + entries).sum() / outputs.sum())


def event_s_per_token(
    cost: CostModel, trigger: Periodic, queries: Queries, held: float
) -> tuple[float, float]:
    """Seconds of events, and windows, per generated token; ``held`` entries precede a window."""
    asked = trigger.window * queries.share
    seconds = cost.observe(
        asked, asked * trigger.compressible, asked * (held + trigger.window / 2), queries
    )
    return seconds / trigger.compressible, 1 / trigger.compressible
