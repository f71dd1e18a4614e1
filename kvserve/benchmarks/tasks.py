"""The tasks that ship: synthetic, exactly gradable, and solvable by the tiny model.

Sizes are fixed here; a model is measured against them, they are never fitted to a model.
Samples are deterministic in (task, index, seed) and their name orders are held out of training.
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvserve.benchmarks.task_text import (
    Sample,
    aggregation,
    chain,
    needles,
    recall,
    redundant_chain,
)

__all__ = ["TASKS", "Grade", "Sample", "Task", "grade", "grade_finals", "make_samples"]

_PIECE = re.compile(r"[A-Za-z]+|\d|[^\w\s]")


@dataclass(frozen=True)
class Task:
    """One shipped task; `max_new_tokens` is a limit per turn with room to spare."""

    name: str
    description: str
    max_new_tokens: int
    build: Callable[[random.Random], Sample]
    final_marker: str = ""


@dataclass(frozen=True)
class Grade:
    """`exact`: every final part is right; `score`: how far, 0 to 1, as the task counts it."""

    exact: bool
    score: float


def _needle_task(units: int) -> Task:
    name = f"needle-{units}"
    return Task(
        name,
        f"8 secret numbers hidden in a text of {units} tokens, 4 of them asked in 4 turns",
        8,
        lambda rng: needles(rng, units, count=8, questions=4, held_out=True, task=name),
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _needle_task(512),
        _needle_task(1024),
        _needle_task(2048),
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
            lambda rng: redundant_chain(rng, registers=8, steps=16, report_after=8, held_out=True),
            final_marker="answer",
        ),
        Task(
            "recall",
            "16 names with two-digit values, all asked back in another order",
            96,
            lambda rng: recall(rng, pairs=16, asked=16, held_out=True),
        ),
        Task(
            "aggregation",
            "8 marked names in a text of 512 tokens, listed in the text's order",
            24,
            lambda rng: aggregation(rng, units=512, marked=8, held_out=True),
        ),
    )
}


def make_samples(task: str, n: int, seed: int) -> list[Sample]:
    """`n` held-out samples; sample `i` does not depend on `n`."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}; choose from {', '.join(TASKS)}")
    return [TASKS[task].build(random.Random(f"held-out/{task}/{seed}/{i}")) for i in range(n)]


def grade_finals(sample: Sample, outputs: Sequence[str]) -> Grade:
    """Grade a sample of a single turn, all of whose answer counts."""
    right = outputs[0].strip() == sample.finals[0]
    return Grade(right, float(right))


def _final(text: str, marker: str) -> str | None:
    if not marker:
        return text.strip()
    _, found, tail = text.rpartition(marker)
    return tail.strip() if found else None


def grade(sample: Sample, outputs: Sequence[str]) -> Grade:
    """Grade one output per turn; a missing turn counts as empty.

    `score` counts words, digits and signs of each expected answer up to that turn's first error,
    over all turns.
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
