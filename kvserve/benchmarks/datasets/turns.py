"""Timing the steps of engines that take turns, so that other load slows all of them alike."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from kvserve import LLM, SamplingParams

STRETCH = 4
"""Steps per turn: caches are warm again after the first of them."""


def submit(llm: LLM, batch: int, prompt: int, output: int) -> None:
    """``batch`` requests of random tokens, greedy, of exactly these lengths."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    rng = np.random.default_rng(0)
    for i in range(batch):
        ids = rng.integers(3, llm.engine.core.info.vocab_size, prompt).tolist()
        llm.engine.add_request(str(i), ids, params)


def step_seconds(llm: LLM, batch: int) -> float:
    """Seconds of one step in which each of ``batch`` sequences gets a token."""
    started = time.perf_counter()
    outputs = llm.engine.step()
    seconds = time.perf_counter() - started
    assert len(outputs) == batch, "a step is meant to give every sequence one token"
    return seconds


def stretch_seconds(llm: LLM, batch: int, steps: int = STRETCH) -> float:
    """Seconds of the median step of one turn."""
    return median([step_seconds(llm, batch) for _ in range(steps)])


def drain(llm: LLM) -> None:
    """Step until all requests have finished."""
    while llm.engine.has_unfinished_requests:
        llm.engine.step()


def median(values: Sequence[float] | np.ndarray) -> float:
    return float(np.median(values))
