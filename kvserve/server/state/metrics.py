"""``GET /metrics``: the engine's counts as ``kvserve:*``, mirrored as ``vllm:*``.

Gauges and counters are read from the newest ``EngineStats`` when scraped; histograms are observed
where requests and outputs pass through the server.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from kvserve.config import EngineConfig
from kvserve.server.state.engine_protocol import Engine
from kvserve.stats import ITERATION_TOKENS, STATS, EngineStats

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
    "request_queue_time_seconds": (
        "Time from arrival to the first step that works on it",
        _LATENCY,
    ),
    "request_prefill_time_seconds": ("Time from that step to the first token", _LATENCY),
    "request_decode_time_seconds": ("Time from the first token to the end", _LATENCY),
    "request_inference_time_seconds": ("Time from that step to the end", _LATENCY),
    "request_time_per_output_token_seconds": ("Mean time per token after the first", _INTER_TOKEN),
    "request_prompt_tokens": ("Prompt tokens per request", _TOKENS),
    "request_generation_tokens": ("Generated tokens per request", _TOKENS),
    "request_params_n": ("The n of requests", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("The max_tokens of requests", _TOKENS),
}
_LABELS = ("model_name", "engine")

Phase = Literal["loading", "ready", "draining", "dead"]
Engines = Mapping[str, EngineStats]
Counts = Mapping[tuple[str, ...], float]
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_HTTP_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one server, in their own registry: a process may have several servers.

    ``vllm``: the common ones under vllm's names too.
    """

    def __init__(
        self,
        engine: Engine,
        config: EngineConfig,
        model_name: str,
        phase: Callable[[], Phase],
        *,
        vllm: bool = True,
    ) -> None:
        self._engine = engine
        self._phase = phase
        self._process = ProcessCollector(registry=None)
        self._config = config
        self._mirror = vllm
        self._model = model_name
        self._histograms = {
            name: Histogram(f"kvserve:{name}", help, _LABELS, registry=None, buckets=buckets)
            for name, (help, buckets) in _HISTOGRAMS.items()
        }
        self._finished: dict[str, Counter[str]] = {}  # by engine, like ``_prefix``
        self._prefix: dict[str, Counter[str]] = {}
        labels = ("handler", "method")
        self._http_requests = CounterMetric(
            "http_requests",
            "Answers by route and class of status, without probes",
            (*labels, "status"),
            registry=None,
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

    def collect(self) -> Iterator[Metric]:
        """The registry calls this on every scrape."""
        engines = self._engine.stats_by_engine
        for engine in engines:
            self._create_series(engine)
        common = [*self._scheduler_families(engines), *self._request_families()]
        yield from common
        if self._mirror:
            yield from map(_mirrored, common)
        yield from self._compression_families(engines)
        for metric in (self._http_requests, self._http_seconds):
            yield from _without_created(metric.collect())
        yield self._state()
        yield from self._process.collect()

    # ---- observations -------------------------------------------------------------------------

    def observe(self, name: str, value: float, engine: str) -> None:
        self._histograms[name].labels(self._model, engine).observe(value)

    def observe_http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an answer of a route; the names are prometheus-fastapi-instrumentator's."""
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_seconds.labels(handler, method).observe(seconds)

    def count_finished(self, reason: str, engine: str) -> None:
        self._create_series(engine)
        self._finished[engine][reason] += 1

    def count_prompt(self, num_tokens: int, num_cached: int, engine: str) -> None:
        self._create_series(engine)
        if self._engine.info.prefix_caching:
            self._prefix[engine] += Counter(queries=num_tokens, hits=num_cached)

    @property
    def prefix(self) -> Counter[str]:
        """Prompt tokens looked up (queries) and found (hits), of all engines."""
        return sum(self._prefix.values(), Counter())

    def _create_series(self, engine: str) -> None:
        """Create the engine's series, so that they start at 0 and not with the first request."""
        if engine not in self._finished:
            self._finished[engine] = Counter(stop=0, length=0, abort=0)
            self._prefix[engine] = Counter()
            for histogram in self._histograms.values():
                histogram.labels(self._model, engine)

    # ---- families -----------------------------------------------------------------------------

    def _state(self) -> Metric:
        help = "1 for what the server is, 0 for what it is not"
        family = GaugeMetricFamily("kvserve:server_state", help, labels=("model_name", "state"))
        phase = self._phase()
        for name in get_args(Phase):
            family.add_metric((self._model, name), name == phase)
        return family

    def _declared(self, engines: Engines, *, vllm: bool) -> Iterator[Metric]:
        """The series that fields of ``EngineStats`` declare, those of vLLM's or the others."""
        for name, stat in STATS.items():
            if stat.metric and stat.vllm == vllm:
                kind: Kind = CounterMetricFamily if stat.counts else GaugeMetricFamily
                counts: Counts = {(e,): getattr(stats, name) for e, stats in engines.items()}
                yield self._family(kind, stat.metric, stat.help, counts)

    def _scheduler_families(self, engines: Engines) -> Iterator[Metric]:
        yield from self._declared(engines, vllm=True)
        help = "Share of blocks in use, 0 to 1; blocks that only the prefix cache holds are free"
        used: Counts = {(engine,): stats.kv_cache_usage for engine, stats in engines.items()}
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", help, used)
        for key, help in (
            ("queries", "Prompt tokens of finished requests"),
            ("hits", "Prompt tokens found in the prefix cache"),
        ):
            found: Counts = {(engine,): counts[key] for engine, counts in self._prefix.items()}
            yield self._family(CounterMetricFamily, f"prefix_cache_{key}", help, found)
        steps = HistogramMetricFamily(
            "kvserve:iteration_tokens_total", "Tokens per step of the engine", labels=_LABELS
        )
        bounds = [*map(floatToGoString, ITERATION_TOKENS), "+Inf"]
        for engine, stats in engines.items():
            buckets = zip(bounds, accumulate(stats.iterations or (0,) * len(bounds)), strict=True)
            steps.add_metric((self._model, engine), [*buckets], stats.iteration_tokens_total)
        yield steps
        cache, compression = self._config.cache, self._config.compression
        labels = "block_size", "num_gpu_blocks", "cache_dtype", "policy", "policy_args"
        size, form = str(cache.block_size or "auto"), cache.kv_cache_dtype
        policy = compression.policy, json.dumps(dict(compression.policy_args))
        settings: Counts = {
            (engine, size, str(stats.blocks_total), form, *policy): 1
            for engine, stats in engines.items()
        }
        help = "Always 1; the labels are settings"
        yield self._family(GaugeMetricFamily, "cache_config_info", help, settings, *labels)

    def _request_families(self) -> Iterator[Metric]:
        ended: Counts = {
            (engine, reason): count
            for engine, counts in self._finished.items()
            for reason, count in counts.items()
        }
        help = "Finished requests by how they ended"
        yield self._family(CounterMetricFamily, "request_success", help, ended, "finished_reason")
        for histogram in self._histograms.values():
            yield from _without_created(histogram.collect())

    def _compression_families(self, engines: Engines) -> Iterator[Metric]:
        yield from self._declared(engines, vllm=False)
        help = "Held tokens over logical tokens of running requests"
        shares: Counts = {
            (engine,): stats.tokens_held / stats.tokens_logical if stats.tokens_logical else 1.0
            for engine, stats in engines.items()
        }
        yield self._family(GaugeMetricFamily, "kv_compression_ratio", help, shares)
        help = "Blocks that new requests can have"
        room: Counts = {
            (e,): stats.blocks_free + stats.blocks_cached for e, stats in engines.items()
        }
        yield self._family(GaugeMetricFamily, "kv_admission_headroom_blocks", help, room)
        missed: Counts = {
            (engine, cause): count
            for engine, stats in engines.items()
            for cause, count in stats.continuation_misses
        }
        help = "Sequences that resumed no continuation, by cause"
        name = "kv_continuation_misses"
        yield self._family(CounterMetricFamily, name, help, missed, "cause")
        policy = self._config.compression.policy
        events: Counter[tuple[str, ...]] = Counter()
        released: Counter[tuple[str, ...]] = Counter()
        for engine, stats in engines.items():
            events.update({(engine, policy, reason): 0 for reason in ("due", "pressure")})
            released[engine, policy] += 0
            for counts in stats.compaction_counts:
                events[engine, counts.policy, counts.reason] += counts.events
                released[engine, counts.policy] += counts.blocks_released
        help = "Compactions; reason is due, or pressure where one came early because blocks ran out"
        yield self._family(CounterMetricFamily, "kv_compactions", help, events, "policy", "reason")
        help = "Blocks that compactions freed"
        yield self._family(CounterMetricFamily, "kv_blocks_released", help, released, "policy")

    def _family(self, kind: Kind, name: str, help: str, counts: Counts, *labels: str) -> Metric:
        """``counts`` by engine and the further ``labels``."""
        family = kind(f"kvserve:{name}", help, labels=(*_LABELS, *labels))
        for key, value in counts.items():
            family.add_metric((self._model, *key), value)
        return family


def _without_created(families: Iterable[Metric]) -> Iterator[Metric]:
    for family in families:
        family.samples = [s for s in family.samples if not s.name.endswith("_created")]
        yield family


def _mirrored(family: Metric) -> Metric:
    """The same under vLLM's name."""
    copy = Metric(family.name.replace("kvserve:", "vllm:", 1), family.documentation, family.type)
    copy.samples = [s._replace(name=s.name.replace("kvserve:", "vllm:", 1)) for s in family.samples]
    return copy
