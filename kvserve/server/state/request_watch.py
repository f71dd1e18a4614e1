"""Feeds the histograms and counters of ``/metrics`` from the growing output of one prompt."""

from __future__ import annotations

import time

from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams
from kvserve.server.state.metrics import Metrics


class RequestWatch:
    """Observes the growing output of one prompt."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._started = self._previous = time.monotonic()
        self._first: float | None = None
        self._tokens = 0
        self._engine = "0"

    def progress(self, output: RequestOutput) -> None:
        now, self._engine = time.monotonic(), output.engine
        tokens = sum(len(choice.token_ids) for choice in output.outputs)
        if tokens > self._tokens:
            if self._first is None:
                self._first = now
                self._observe("time_to_first_token_seconds", now - self._started)
            else:
                self._observe("inter_token_latency_seconds", now - self._previous)
            self._previous, self._tokens = now, tokens
        if output.finished:
            self._finish(output, now)

    def ended(self, reason: str) -> None:
        """Count a prompt that ended unfinished: the client left, or the engine failed."""
        self._metrics.count_finished(reason, self._engine)

    def _finish(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        total, first = now - self._started, self._first or now
        queued = output.metrics.queued_seconds if output.metrics is not None else 0.0
        self._observe("e2e_request_latency_seconds", total)
        self._observe("request_queue_time_seconds", queued)
        self._observe("request_prefill_time_seconds", max(first - self._started - queued, 0.0))
        self._observe("request_decode_time_seconds", now - first)
        self._observe("request_inference_time_seconds", max(total - queued, 0.0))
        if self._tokens > len(output.outputs):
            mean = (now - first) / (self._tokens / len(output.outputs) - 1)
            self._observe("request_time_per_output_token_seconds", mean)
        self._observe("request_prompt_tokens", len(output.prompt_token_ids))
        self._observe("request_generation_tokens", self._tokens)
        self._observe("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            self._observe("request_params_max_tokens", self._params.max_tokens)
        cached = output.num_cached_tokens
        if output.kv_cache_details.resumed_tokens:
            cached = 0  # they came from a continuation, not the prefix cache
        metrics.count_prompt(len(output.prompt_token_ids), cached, self._engine)
        for choice in output.outputs:
            metrics.count_finished(choice.finish_reason or "abort", self._engine)

    def _observe(self, name: str, value: float) -> None:
        self._metrics.observe(name, value, self._engine)
