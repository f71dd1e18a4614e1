"""``GET /metrics`` and the log line: the engine's counts as ``kvserve:*``, mirrored as ``vllm:*``.

Gauges and counters are read from the newest ``EngineStats`` when scraped; histograms are observed
where requests and outputs pass through the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvserve.config import EngineConfig
from kvserve.log import logger
from kvserve.outputs import ITERATION_TOKENS, EngineStats, RequestOutput
from kvserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvserve.server.state import Engine, ServerOptions

LOG_INTERVAL = 10.0

_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(m * 10**e for e in range(7) for m in (1, 2, 5))
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_INTER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Time from arrival to the first token", _FIRST_TOKEN),
    "inter_token_latency_seconds": ("Time between two outputs of a request", _INTER_TOKEN),
    "e2e_request_latency_seconds": ("Time from arrival to the end", _LATENCY),
    "request_queue_time_seconds": ("Time until the engine took it up", _LATENCY),
    "request_prefill_time_seconds": ("Time from there to the first token", _LATENCY),
    "request_decode_time_seconds": ("Time from the first token to the end", _LATENCY),
    "request_inference_time_seconds": ("Time from being taken up to the end", _LATENCY),
    "request_time_per_output_token_seconds": ("Mean time of a token after the first", _INTER_TOKEN),
    "request_prompt_tokens": ("Prompt tokens per request", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request", _TOKENS),
    "request_params_n": ("The n parameter", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The max_tokens parameter", _TOKENS),
}
_LABELS = ("model_name", "engine")
_HTTP_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Own registry, so that several servers may live in one process."""

    def __init__(self, engine: Engine, config: EngineConfig, options: ServerOptions) -> None:
        self._engine = engine
        self._config = config
        self._mirror = options.vllm_metrics
        self._labels = (options.served_names[0], "0")
        self._histograms = {
            name: Histogram(f"kvserve:{name}", help, _LABELS, registry=None, buckets=buckets)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        self._observers = {
            name: histogram.labels(*self._labels) for name, histogram in self._histograms.items()
        }
        self._finished = Counter({(reason,): 0 for reason in ("stop", "length", "abort")})
        self.prefix = Counter(queries=0, hits=0)
        labels = ("handler", "method")
        self._http_requests = CounterMetric(
            "http_requests", "Answers by route", (*labels, "status"), registry=None
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds",
            "Time to the end of an answer",
            labels,
            registry=None,
            buckets=_HTTP_SECONDS,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def watch(self, params: SamplingParams) -> RequestWatch:
        return RequestWatch(self, params)

    def collect(self) -> Iterator[Metric]:
        """The registry calls this on every scrape."""
        common = [*self._scheduler_families(self._engine.stats), *self._request_families()]
        yield from common
        if self._mirror:
            yield from (_renamed(family, "vllm:") for family in common)
        yield from self._compression_families(self._engine.stats)
        for metric in (self._http_requests, self._http_seconds):
            yield from _without_created(metric.collect())

    # ---- observations -------------------------------------------------------------------------

    def observe(self, name: str, value: float) -> None:
        self._observers[name].observe(value)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An answer of a route, under prometheus-fastapi-instrumentator's names."""
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def count_finished(self, reason: str) -> None:
        self._finished[reason,] += 1

    def count_prompt(self, num_tokens: int, num_cached: int) -> None:
        if self._config.cache.enable_prefix_caching:
            self.prefix["queries"] += num_tokens
            self.prefix["hits"] += num_cached

    # ---- families -----------------------------------------------------------------------------

    def _scheduler_families(self, stats: EngineStats) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests in the batch", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Blocks in use, 0 to 1", stats.kv_cache_usage)
        yield self._counter("prompt_tokens", "Prompt tokens computed", stats.prompt_tokens_total)
        yield self._counter("generation_tokens", "Tokens made", stats.generation_tokens_total)
        yield self._counter("num_preemptions", "Preempted sequences", stats.preemptions_total)
        yield self._counter("prefix_cache_queries", "Tokens looked up", self.prefix["queries"])
        yield self._counter("prefix_cache_hits", "Tokens found", self.prefix["hits"])
        yield self._iterations(stats)
        info = {
            "block_size": self._config.cache.block_size or "auto",
            "num_gpu_blocks": stats.blocks_total,
            "policy": self._config.compression.policy,
            "policy_args": json.dumps(dict(self._config.compression.policy_args)),
        }
        names = (*_LABELS, *info)
        family = GaugeMetricFamily(
            "kvserve:cache_config_info", "Settings of the cache", labels=names
        )
        family.add_metric([*self._labels, *map(str, info.values())], 1)
        yield family

    def _iterations(self, stats: EngineStats) -> Metric:
        family = HistogramMetricFamily(
            "kvserve:iteration_tokens_total", "Tokens per step of the engine", labels=_LABELS
        )
        bounds = [*map(floatToGoString, ITERATION_TOKENS), "+Inf"]
        counts = accumulate(stats.iterations or (0,) * len(bounds))
        buckets = list(zip(bounds, counts, strict=True))
        family.add_metric(self._labels, buckets, stats.iteration_tokens_total)
        return family

    def _request_families(self) -> Iterator[Metric]:
        yield self._counter_by(
            "request_success", "Requests by how they ended", ("finished_reason",), self._finished
        )
        for histogram in self._histograms.values():
            yield from _without_created(histogram.collect())

    def _compression_families(self, stats: EngineStats) -> Iterator[Metric]:
        held, logical = stats.tokens_held, stats.tokens_logical
        headroom = stats.blocks_free + stats.blocks_cached
        yield self._gauge("kv_tokens_logical", "Tokens of the running requests", logical)
        yield self._gauge("kv_tokens_held", "Tokens that the cache still holds", held)
        yield self._gauge(
            "kv_compression_ratio", "Held over logical tokens", held / logical if logical else 1.0
        )
        yield self._gauge("kv_admission_headroom_blocks", "Blocks for new requests", headroom)
        yield self._counter("kv_tokens_evicted", "Tokens evicted", stats.tokens_evicted_total)
        yield self._counter(
            "kv_compaction_seconds", "Seconds spent compacting", stats.compaction_seconds_total
        )
        yield self._gauge(
            "kv_scoring_workspace_bytes",
            "Most bytes that scoring takes at once",
            stats.scoring_workspace_bytes,
        )
        yield self._counter("kv_swaps", "Preemptions to host memory", stats.swaps_total)
        policy = self._config.compression.policy
        events = Counter({(policy, "due"): 0, (policy, "pressure"): 0})
        released = Counter({(policy,): 0})
        for counts in stats.compaction_counts:
            events[counts.policy, counts.reason] += counts.events
            released[counts.policy,] += counts.blocks_released
        yield self._counter_by(
            "kv_compactions", "Compactions, due or for want of blocks", ("policy", "reason"), events
        )
        yield self._counter_by(
            "kv_blocks_released", "Released blocks by policy", ("policy",), released
        )
        coded, book = stats.coded_entries, stats.codebook_entries
        yield self._gauge("kv_coded_entries", "Entries that are held as codes", coded)
        yield self._gauge("kv_codebook_entries", "Vectors that stand for their halves", book)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"kvserve:{name}", help, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"kvserve:{name}", help, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter_by(
        self, name: str, help: str, labels: tuple[str, ...], counts: Counter[Any]
    ) -> Metric:
        family = CounterMetricFamily(f"kvserve:{name}", help, labels=(*_LABELS, *labels))
        for key, value in counts.items():
            family.add_metric([*self._labels, *key], value)
        return family


def _without_created(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        yield family


def _renamed(family: Metric, prefix: str) -> Metric:
    copy = Metric(family.name.replace("kvserve:", prefix, 1), family.documentation, family.type)
    copy.samples = [
        sample._replace(name=sample.name.replace("kvserve:", prefix, 1))
        for sample in family.samples
    ]
    return copy


class RequestWatch:
    """Turns one prompt's growing output into observations."""

    def __init__(self, metrics: Metrics, params: SamplingParams) -> None:
        self._metrics = metrics
        self._params = params
        self._started = self._previous = time.monotonic()
        self._first: float | None = None
        self._tokens = 0

    def progress(self, output: RequestOutput) -> None:
        now = time.monotonic()
        tokens = sum(len(choice.token_ids) for choice in output.outputs)
        if tokens > self._tokens:
            if self._first is None:
                self._first = now
                self._metrics.observe("time_to_first_token_seconds", now - self._started)
            else:
                self._metrics.observe("inter_token_latency_seconds", now - self._previous)
            self._previous, self._tokens = now, tokens
        if output.finished:
            self._finish(output, now)

    def ended(self, reason: str) -> None:
        """It ended without finishing: the client left, or the engine failed."""
        self._metrics.count_finished(reason)

    def _finish(self, output: RequestOutput, now: float) -> None:
        metrics = self._metrics
        total, first = now - self._started, self._first or now
        queued = output.metrics.queued_seconds if output.metrics is not None else 0.0
        metrics.observe("e2e_request_latency_seconds", total)
        metrics.observe("request_queue_time_seconds", queued)
        metrics.observe("request_prefill_time_seconds", max(first - self._started - queued, 0.0))
        metrics.observe("request_decode_time_seconds", now - first)
        metrics.observe("request_inference_time_seconds", max(total - queued, 0.0))
        if self._tokens > len(output.outputs):
            mean = (now - first) / (self._tokens / len(output.outputs) - 1)
            metrics.observe("request_time_per_output_token_seconds", mean)
        metrics.observe("request_prompt_tokens", len(output.prompt_token_ids))
        metrics.observe("request_generation_tokens", self._tokens)
        metrics.observe("request_params_n", self._params.n)
        if self._params.max_tokens is not None:
            metrics.observe("request_params_max_tokens", self._params.max_tokens)
        metrics.count_prompt(len(output.prompt_token_ids), output.num_cached_tokens)
        for choice in output.outputs:
            metrics.count_finished(choice.finish_reason or "abort")


@dataclass
class StatsLog:
    """The line in the log while there is something to tell."""

    engine: Engine
    metrics: Metrics
    _last: EngineStats = field(default_factory=EngineStats)
    _time: float = 0.0
    _prefix: Counter[str] = field(default_factory=Counter)

    async def run(self, interval: float = LOG_INTERVAL) -> None:
        self._time = time.monotonic()
        while True:
            await asyncio.sleep(interval)
            self.log()

    def log(self) -> None:
        new, old, now = self.engine.stats, self._last, time.monotonic()
        seconds = max(now - self._time, 1e-9)
        self._last, self._time = new, now
        prefix = self.metrics.prefix - self._prefix
        self._prefix = self.metrics.prefix.copy()
        prompt = new.prompt_tokens_total - old.prompt_tokens_total
        generated = new.generation_tokens_total - old.generation_tokens_total
        if not (prompt or generated or new.num_running or new.num_waiting):
            return
        logger.info(
            "prompt %.1f tok/s, generation %.1f tok/s, Running: %d, Waiting: %d, "
            "KV usage: %.1f%%, prefix hits: %.1f%%, tokens held/logical: %d/%d, "
            "blocks released: %d",
            prompt / seconds,
            generated / seconds,
            new.num_running,
            new.num_waiting,
            100 * new.kv_cache_usage,
            100 * prefix["hits"] / max(prefix["queries"], 1),
            new.tokens_held,
            new.tokens_logical,
            new.blocks_released_total - old.blocks_released_total,
        )
