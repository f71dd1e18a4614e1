"""OpenTelemetry (extra ``otel``): one span per prompt, in the trace that its client began, with an
event for each compaction.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvserve.folders import install
from kvserve.log import ConfigError
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import SamplingParams


class Tracer:
    """Sends spans to an OTLP endpoint, or to ``exporter`` if one is given."""

    def __init__(self, endpoint: str, model: str, exporter: Any = None) -> None:
        try:
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = exporter or _exporter(endpoint)
        except ImportError:
            raise ConfigError(
                f"--otlp-traces-endpoint: OpenTelemetry is not installed: {install('otel')}"
            ) from None
        self._model = model
        self._propagator = TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "kvserve"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvserve")

    def start(self, headers: Mapping[str, str], request_id: str, params: SamplingParams) -> Any:
        """A span that begins now, in the trace that the header ``traceparent`` names."""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.id": request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.choice.count": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        context = self._propagator.extract(headers)
        return self._tracer.start_span("llm_request", context, attributes=attributes)

    def end(self, span: Any, output: RequestOutput | None) -> None:
        """End a span, with its prompt's compactions, counts and times."""
        for event in output.compactions if output is not None else ():
            span.add_event(
                "kvserve.compaction",
                {
                    "kvserve.reason": event.reason,
                    "kvserve.evicted_tokens": event.evicted_tokens,
                    "kvserve.held_tokens": event.held_tokens,
                },
                int(event.time * 1e9),
            )
        if output is not None and output.metrics is not None:
            times, details = output.metrics, output.kv_cache_details
            reasons = [choice.finish_reason or "abort" for choice in output.outputs]
            tokens = sum(len(choice.token_ids) for choice in output.outputs)
            # The names before and since the semantic conventions of 2025.
            for name in ("prompt_tokens", "input_tokens"):
                span.set_attribute(f"gen_ai.usage.{name}", len(output.prompt_token_ids))
            for name in ("completion_tokens", "output_tokens"):
                span.set_attribute(f"gen_ai.usage.{name}", tokens)
            span.set_attribute("gen_ai.response.finish_reasons", reasons)
            span.set_attribute("gen_ai.latency.time_in_queue", times.queued_seconds)
            span.set_attribute("gen_ai.latency.e2e", time.time() - times.arrival_time)
            if times.first_token_time is not None:
                first = times.first_token_time - times.arrival_time
                span.set_attribute("gen_ai.latency.time_to_first_token", first)
            span.set_attribute("kvserve.policy", details.policy)
            span.set_attribute("kvserve.compactions", details.compactions)
            span.set_attribute("kvserve.evicted_tokens", details.evicted_tokens)
            span.set_attribute("kvserve.blocks_released", details.blocks_released)
        span.end()

    def shutdown(self) -> None:
        """Send the spans that have not been sent."""
        self._provider.shutdown()


def _exporter(endpoint: str) -> Any:
    if endpoint.startswith("http") and endpoint.rstrip("/").endswith("/v1/traces"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

    return ByGrpc(endpoint=endpoint, insecure=not endpoint.startswith("https"))
