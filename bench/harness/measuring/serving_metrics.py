"""Figures of a serving run and the block they are printed in; names and keys are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.harness.measuring.serving_client import Answer

Result = dict[str, Any]

GOODPUT_METRICS = ("ttft", "tpot", "e2el")
"""Attributes of an ``Answer``, in seconds."""
TITLES = {
    "ttft": ("Time to First Token", "TTFT"),
    "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"),
    "e2el": ("End-to-end Latency", "E2EL"),
}


def summary(
    answers: Sequence[Answer],
    seconds: float,
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    goodput: Mapping[str, float],
) -> Result:
    """Counts, rates and percentiles over the requests that succeeded; ``goodput`` is in ms.

    A metric that no request has is left out.
    """
    good = [answer for answer in answers if not answer.error]
    outputs = sum(answer.output_tokens for answer in good)
    inputs = sum(answer.prompt_len for answer in good)
    in_time = sum(
        all(1000 * getattr(answer, name) <= limit for name, limit in goodput.items())
        for answer in good
    )
    result: Result = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(good) / seconds,
        "request_goodput": in_time / seconds if goodput else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_output_tokens_per_s": _busiest_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    samples = {
        "ttft": [answer.ttft for answer in good],
        "tpot": [answer.tpot for answer in good if answer.output_tokens > 1],
        "itl": [gap for answer in good for gap in answer.itls],
        "e2el": [answer.e2el for answer in good],
    }
    for name in filter(samples.get, metrics):
        values = 1000 * np.asarray(samples[name])
        result |= {
            f"mean_{name}_ms": float(values.mean()),
            f"median_{name}_ms": float(np.median(values)),
            f"std_{name}_ms": float(values.std()),
            **{f"p{p:g}_{name}_ms": float(np.percentile(values, p)) for p in percentiles},
        }
    return result


def per_request(answers: Sequence[Answer], started: float) -> Result:
    """The lists of ``--save-detailed``, in the order of sending."""
    return {
        "input_lens": [answer.prompt_len for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "start_times": [answer.sent - started for answer in answers],
        "ttfts": [answer.ttft for answer in answers],
        "itls": [answer.itls for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
    }


def _busiest_second(good: Sequence[Answer]) -> float:
    """Most tokens that arrived in one second, counted from the first request."""
    arrivals = [arrival for answer in good for arrival in answer.arrivals]
    if not arrivals:
        return 0.0
    first = min(answer.sent for answer in good)
    seconds = np.array([int(time - first) for time, _ in arrivals])
    return float(np.bincount(seconds, [tokens for _, tokens in arrivals]).max())


def _most_at_once(good: Sequence[Answer]) -> int:
    """Most requests under way at the same time."""
    changes = [(a.sent, 1) for a in good] + [(a.ended, -1) for a in good]
    return int(np.cumsum([change for _, change in sorted(changes)]).max()) if changes else 0


# ---- printing ---------------------------------------------------------------------------------


def report_block(result: Result, metrics: Sequence[str], percentiles: Sequence[float]) -> list[str]:
    """Lines of the block; figures that the result does not have are left out."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]
    lines += _lines(result, _COUNTS)
    for name in metrics:
        title, short = TITLES[name]
        keys = [("Mean", "mean"), ("Median", "median")]
        keys += [(f"P{p:g}", f"p{p:g}") for p in percentiles]
        rows = [(f"{word} {short} (ms):", f"{key}_{name}_ms", ".2f") for word, key in keys]
        found = _lines(result, rows)
        lines += [f"{title:-^50}", *found] if found else []
    kv = _lines(result, _KV)
    return [*lines, *([f"{'KV cache':-^50}", *kv] if kv else []), "=" * 50]


_COUNTS = (
    ("Successful requests:", "completed", "d"),
    ("Failed requests:", "failed", "d"),
    ("Maximum request concurrency:", "max_concurrency", "d"),
    ("Request rate configured (RPS):", "request_rate", ".2f"),
    ("Benchmark duration (s):", "duration", ".2f"),
    ("Total input tokens:", "total_input_tokens", "d"),
    ("Total generated tokens:", "total_output_tokens", "d"),
    ("Request throughput (req/s):", "request_throughput", ".2f"),
    ("Request goodput (req/s):", "request_goodput", ".2f"),
    ("Output token throughput (tok/s):", "output_throughput", ".2f"),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", ".2f"),
    ("Peak concurrent requests:", "max_concurrent_requests", "d"),
    ("Total Token throughput (tok/s):", "total_token_throughput", ".2f"),
)
_KV = (
    ("Mean running sequences:", "mean_running", ".1f"),
    ("Peak running sequences:", "peak_running", "d"),
    ("Held / logical tokens, while running:", "held_over_logical", ".3f"),
    ("Held / logical tokens, at the end:", "held_over_logical_at_end", ".3f"),
    ("Events:", "compactions", "d"),
    ("Blocks released:", "blocks_released", "d"),
    ("Preemptions:", "preemptions", "d"),
    ("Median TTFT of later turns (ms):", "median_follow_up_ttft_ms", ".2f"),
    ("P99 TTFT of later turns (ms):", "p99_follow_up_ttft_ms", ".2f"),
    ("Prompt tokens computed:", "prompt_tokens_computed", "d"),
    ("Turns that went on from the last:", "resumed_turns", "d"),
    ("Exact match:", "exact_match", ".3f"),
    ("Correct prefix:", "correct_prefix", ".3f"),
)


def _lines(result: Result, rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [
        f"{title:<40} {format(result[key], style):<10}".rstrip()
        for title, key, style in rows
        if result.get(key) not in (None, "inf")
    ]
