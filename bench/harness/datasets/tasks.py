"""The tasks that ship: synthetic, exactly gradable, and solvable by the models that ship.

Sizes are fixed here and never fitted to a model. Samples are deterministic in (task, index, seed),
and their name orders are held out of training.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.harness.datasets.long_chain import long_chain
from bench.harness.datasets.task_text import Sample, chain, needles, recall, redundant_chain

_PIECE = re.compile(r"[A-Za-z]+|\d|[^\w\s]")


@dataclass(frozen=True)
class Task:
    """One shipped task; `max_new_tokens` is a generous limit per turn."""

    name: str
    description: str
    max_new_tokens: int
    build: Callable[[random.Random], Sample]
    final_marker: str = ""


@dataclass(frozen=True)
class Grade:
    """`exact`: every final part is right; `score`: from 0 to 1, as the task counts it."""

    exact: bool
    score: float


def _needle_task(units: int, again: bool = False) -> Task:
    name = f"needle-{units}-again" if again else f"needle-{units}"
    asked = "asked in 4 turns, then all again" if again else "asked in 4 turns"
    return Task(
        name,
        f"8 secret numbers hidden in a text of {units} tokens, 4 of them {asked}",
        8,
        lambda rng: needles(rng, units, 8, 4, held_out=True, task=name, again=again),
    )


def _long_task(tokens: int, lines: int, given: int) -> Task:
    name = f"long-chain-{tokens}"
    return Task(
        name,
        f"{lines} lines of sums modulo 10 and recaps, checked and talked over in {tokens} tokens",
        tokens + tokens // 8,
        lambda rng: long_chain(rng, lines, held_out=True, task=name, given=given),
        final_marker="answer",
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _needle_task(512),
        _needle_task(1024),
        _needle_task(2048),
        _needle_task(1024, again=True),
        Task(
            "chain",
            "30 sums modulo 10 worked out step by step, every name assigned once",
            384,
            lambda rng: chain(rng, steps=30, held_out=True),
            final_marker="answer",
        ),
        Task(
            "redundant-chain",
            "16 sums modulo 10 over 8 re-assigned names, with narration and a state report",
            512,
            lambda rng: redundant_chain(
                rng, registers=8, steps=16, report_after=(8,), held_out=True
            ),
            final_marker="answer",
        ),
        _long_task(1000, lines=22, given=6),
        _long_task(2000, lines=44, given=8),
        _long_task(4000, lines=88, given=10),
        Task(
            "terse-chain",
            "88 lines of sums modulo 10 and recaps, without checks and talk",
            1152,
            lambda rng: long_chain(rng, 88, held_out=True, task="terse-chain", given=8, terse=True),
            final_marker="answer",
        ),
        Task(
            "recall",
            "16 names with two-digit values, all asked back in another order",
            96,
            lambda rng: recall(rng, pairs=16, asked=16, held_out=True),
        ),
    )
}


_FOR_LONG_TRACES = ("chain", "redundant-chain", *(name for name in TASKS if "long" in name))
_WHEN_NAMED = ("needle-1024-again", "terse-chain")


def default_tasks(model: str) -> list[str]:
    """The tasks a shipped model was trained for; for other models all but the long traces.

    Questions asked again are left out, since they are for `--continuations`, and terse chains,
    for which no shipped model was trained.
    """
    if model == "kvserve/tiny-long":
        return [name for name in TASKS if name in _FOR_LONG_TRACES]
    return [name for name in TASKS if "long" not in name and name not in _WHEN_NAMED]


def make_samples(task: str, n: int, seed: int) -> list[Sample]:
    """`n` held-out samples; sample `i` does not depend on `n`."""
    return [TASKS[task].build(random.Random(f"held-out/{task}/{seed}/{i}")) for i in range(n)]


def _final(text: str, marker: str) -> str | None:
    if not marker:
        return text.strip()
    _, found, tail = text.rpartition(marker)
    return tail.strip() if found else None


def grade(sample: Sample, outputs: Sequence[str]) -> Grade:
    """Grade one output per turn; a missing turn counts as empty.

    `score` is the share of words, digits and signs of the expected answers that come before the
    first error of their turn.
    """
    marker = TASKS[sample.task].final_marker
    padded = [*outputs, *[""] * len(sample.turns)][: len(sample.turns)]
    exact = all(
        _final(output, marker) == final for output, final in zip(padded, sample.finals, strict=True)
    )
    right = total = 0
    for output, answer in zip(padded, sample.answers, strict=True):
        expected, got = _PIECE.findall(answer), _PIECE.findall(output)
        total += len(expected)
        for want, have in zip(expected, got, strict=False):
            if want != have:
                break
            right += 1
    return Grade(exact, right / total)
