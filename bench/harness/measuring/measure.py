"""Plays a workload on an engine, step by step, and counts what happens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import sqrt
from typing import Any, Protocol

import numpy as np

from bench.harness.datasets.workload import Workload
from kvserve.engine.cache.entry_store import remainder_bytes, score_bytes
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.outputs import RequestOutput
from kvserve.progress import progress
from kvserve.sampling_params import SamplingParams
from kvserve.stats import EngineStats

Figures = dict[str, Any]
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""``cpu``: CPU time of this process, which other load on the machine does not increase."""

_Z95 = 1.959963984540054
_COUNTERS = (
    ("blocks_released", "blocks_released_total"),
    ("compactions", "compactions_total"),
    ("early_compactions", "early_compactions_total"),
    ("compaction_s", "compaction_seconds_total"),
    ("evicted_tokens", "tokens_evicted_total"),
    ("preemptions", "preemptions_total"),
    ("swaps", "swaps_total"),
    ("resumed_turns", "resumed_total"),
    ("draft_tokens", "draft_tokens_total"),
    ("accepted_tokens", "accepted_tokens_total"),
)


class PlayedEngine(Protocol):
    """The part of ``LLMEngine`` that is measured."""

    @property
    def has_unfinished_requests(self) -> bool: ...

    def add_request(
        self, request_id: str, prompt: str | Sequence[int], params: SamplingParams
    ) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Played:
    """The turns of each conversation, and the figures of the whole run."""

    turns: list[list[RequestOutput]]
    figures: Figures

    @property
    def answers(self) -> list[list[str]]:
        return [[turn.outputs[0].text for turn in turns] for turns in self.turns]


def play(
    engine: PlayedEngine,
    workload: Workload,
    title: str = "",
    show: bool = False,
    clock: Callable[[], float] = time.perf_counter,
    *,
    settings: Callable[[int, int], Mapping[str, Any]] = lambda index, turn: {},
    at_once: int | None = None,
) -> Played:
    """Send all first turns at once (``at_once``: those of so many conversations, and another's as
    one ends), and each next turn as soon as the answer is there.

    Answers are greedy; ``settings`` has other sampling parameters of a conversation's turn. Time
    runs from the first request to the last token. It includes reading the engine's figures between
    steps, because a device whose steps overlap goes on working meanwhile. ``clock``: one of
    ``CLOCKS``.
    """
    turns: list[list[RequestOutput]] = [[] for _ in range(len(workload))]
    meter = _StepMeter(engine.stats())

    def send_next(index: int) -> bool:
        prompt = workload.prompt(index, [turn.outputs[0].text for turn in turns[index]])
        if prompt is not None:
            turn = len(turns[index])
            limits = {"max_tokens": workload.max_tokens(index), "ignore_eos": workload.ignore_eos}
            params = SamplingParams(**{"temperature": 0.0, **limits, **settings(index, turn)})
            engine.add_request(f"{index}.{turn}", prompt, params)
        return prompt is not None

    waiting = iter(range(len(workload)))

    bar = progress(total=len(workload), desc=title, unit="request", hidden=not show)
    with bar:
        started = clock()
        for index in islice(waiting, at_once):
            send_next(index)
        while engine.has_unfinished_requests:
            changed = engine.step()
            over = 0
            for output in changed:
                if output.finished:
                    index = int(output.request_id.partition(".")[0])
                    turns[index].append(output)
                    if not send_next(index):
                        over += 1
                        for following in islice(waiting, 1):
                            send_next(following)
            meter.record(changed, clock() - started, engine.stats())
            bar.update(over)
    return Played(turns, meter.figures(workload, turns, engine.stats()))


@dataclass
class _StepMeter:
    """Adds up steps; counters are differences to ``before``, so that a warm-up does not count."""

    before: EngineStats
    seconds: float = 0.0
    running: list[int] = field(default_factory=list)
    held: int = 0
    logical: int = 0
    pool_usage: float = 0.0
    gaps: list[float] = field(default_factory=list)
    step_rates: list[float] = field(default_factory=list)
    last_token: dict[str, float] = field(default_factory=dict)

    def record(self, changed: Sequence[RequestOutput], until: float, stats: EngineStats) -> None:
        """Record a step that ended ``until`` seconds after the first request was sent."""
        seconds, self.seconds = until - self.seconds, until
        ended = sum(output.finished for output in changed)
        self.running.append(stats.num_running + ended)
        self.held += stats.tokens_held
        self.logical += stats.tokens_logical
        self.pool_usage += stats.kv_cache_usage
        self.step_rates.append(len(changed) / seconds)
        for output in changed:
            previous = self.last_token.get(output.request_id)
            if previous is not None:
                self.gaps.append(self.seconds - previous)
            self.last_token[output.request_id] = self.seconds

    def figures(
        self, workload: Workload, turns: list[list[RequestOutput]], after: EngineStats
    ) -> Figures:
        ended = [turn for conversation in turns for turn in conversation]
        prompted = sum(len(turn.prompt_token_ids) for turn in ended)
        tokens = sum(len(turn.outputs[0].token_ids) for turn in ended)
        steps = len(self.running)
        counted = {
            name: getattr(after, total) - getattr(self.before, total) for name, total in _COUNTERS
        }
        drafts = counted["draft_tokens"]
        p50, p99 = np.percentile(self.gaps, [50, 99]).tolist() if self.gaps else (None, None)
        return {
            "requests": len(ended),
            "input_tokens": prompted,
            "prompt_cached": sum(turn.num_cached_tokens for turn in ended) / prompted,
            "output_tokens": tokens,
            "wall_s": self.seconds,
            "output_tok_s": tokens / self.seconds,
            "mean_step_output_tok_s": float(np.mean(self.step_rates)),
            "steps": steps,
            "mean_running": sum(self.running) / steps,
            "peak_running": max(self.running),
            "mean_held_tokens": self.held / steps,
            "mean_logical_tokens": self.logical / steps,
            "held_over_logical": self.held / self.logical if self.logical else None,
            **_held_at_end([conversation[-1] for conversation in turns if conversation]),
            "blocks_total": after.blocks_total,
            "mean_pool_usage": self.pool_usage / steps,
            **counted,
            "draft_tokens": drafts or None,
            "accepted_share": counted["accepted_tokens"] / drafts if drafts else None,
            "itl_p50_ms": None if p50 is None else 1000 * p50,
            "itl_p99_ms": None if p99 is None else 1000 * p99,
            "finish_reasons": dict(Counter(turn.outputs[0].finish_reason for turn in ended)),
            "cut_short": sum(
                _cut_short(turn, workload.max_tokens(index))
                for index, conversation in enumerate(turns)
                for turn in conversation
            ),
            "running_over_steps": _thinned(self.running),
        }


def _held_at_end(last: Sequence[RequestOutput]) -> Figures:
    """What the cache held when each conversation ended; those that were cut off have no details."""
    details = [kv for output in last if (kv := output.kv_cache_details).logical_tokens]
    count = max(len(details), 1)
    return {
        "held_over_logical_at_end": sum(kv.held_tokens for kv in details)
        / max(sum(kv.logical_tokens for kv in details), 1),
        "held_entries_at_end": sum(kv.held_entries for kv in details) / count,
        "rest_entries_at_end": sum(kv.rest_entries for kv in details) / count,
        "remainder_entries_at_end": sum(kv.remainder_entries for kv in details) / count,
        "allocated_bytes_at_end": sum(kv.held_bytes + kv.log_bytes for kv in details) / count,
        "codebook_over_coded_at_end": sum(kv.codebook_entries for kv in details)
        / max(2 * sum(kv.coded_entries for kv in details), 1),
    }


def held_bytes(engine: LLMEngine, figures: Figures) -> Figures:
    """Bytes per sequence: of its entries when it ends, and of its blocks as a mean over the run.

    The mean is all blocks in use (keys, values, logged queries) over all running
    sequences, what stands for dropped entries at a sequence's end, and scores that the policy keeps
    for the next event; others are freed when an event ends. Blocks in host memory are not in it.
    """
    cache = engine.core.runner.cache
    layout, pool = cache.layout, cache.kv.nbytes  # including the null block
    lanes = layout.num_layers * layout.num_kv_heads
    remainders = figures["remainder_entries_at_end"] * remainder_bytes(layout) / lanes
    scores = score_bytes(layout, engine.core.runner.policies[0].demands.kept_scores)
    entry = cache.form.mean_bytes(layout.head_dim, layout.layers_per_block)
    rest, of_rest = figures["rest_entries_at_end"], 0.0
    if cache.rest:
        of_rest = rest * cache.kv[0].nbytes / (cache.rest[0][0].shape[1] * lanes)
    kept = (figures["held_entries_at_end"] - rest) * entry
    return {
        "held_bytes_at_end": kept + of_rest + remainders,
        "pool_bytes": pool,
        "mean_held_bytes": figures["mean_pool_usage"] * pool / figures["mean_running"]
        + remainders
        + scores,
    }


def _cut_short(turn: RequestOutput, limit: int) -> bool:
    """Whether a request ended because blocks ran out, not at its limit nor by a stop token."""
    choice = turn.outputs[0]
    return choice.finish_reason == "length" and len(choice.token_ids) < limit


def _thinned(values: Sequence[float], count: int = 50) -> list[float]:
    """Means over ``count`` equal stretches."""
    parts = np.array_split(np.asarray(values, float), min(count, len(values)))
    return [round(float(part.mean()), 2) for part in parts]


def accuracy(workload: Workload, answers: Sequence[Sequence[str]], each: int = 1) -> Figures:
    """Exact match with its interval, and the mean score; empty where nothing is graded.

    Each problem has ``each`` answers, which follow one another. If these are several, a problem
    counts by their mean, and error and interval are over problems: answers to one say nothing about
    others.
    """
    grades = workload.grades(answers)
    if not grades:
        return {}
    exact = np.array([grade.exact for grade in grades], float).reshape(-1, each).mean(1)
    figures: Figures = {
        "n": len(exact),
        "exact": sum(grade.exact for grade in grades),
        "exact_match": float(exact.mean()),
        "interval_95": wilson_interval(float(exact.sum()), len(exact)),
        workload.score_name: sum(grade.score for grade in grades) / len(grades),
    }
    if each > 1:
        figures |= {"answers_each": each, "exact_match_error": standard_error(exact.tolist())}
    return figures


def standard_error(values: Sequence[float]) -> float | None:
    """Standard error of the mean, if there are several values."""
    return float(np.std(values, ddof=1) / sqrt(len(values))) if len(values) > 1 else None


def wilson_interval(successes: float, n: int) -> tuple[float, float]:
    """Wilson's 95% interval of a proportion; the normal interval has no width at 0 and 1.

    A success may be a part, which varies less than whole ones: then it is too wide.
    """
    p, z2 = successes / n, _Z95**2
    centre, spread = p + z2 / (2 * n), _Z95 * sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low, high = (centre - spread) / (1 + z2 / n), (centre + spread) / (1 + z2 / n)
    return max(0.0, min(low, p)), min(1.0, max(high, p))  # p is in it despite rounding
