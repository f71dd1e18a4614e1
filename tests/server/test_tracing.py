"""Spans: one per request, in the client's trace, with what became of it."""

from __future__ import annotations

import pytest

from kvserve.log import ConfigError
from kvserve.server.state.tracing import Tracer
from tests.server.conftest import MODEL, StartServer
from tests.server.fake_engine import FakeEngine
from tests.waiting import wait_until

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_span_per_request(start_server: StartServer) -> None:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    server = start_server(FakeEngine())
    tracer = server.state.tracer = Tracer("", MODEL, exporter)
    headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    body = {"prompt": ["a", "b"], "max_tokens": 16, "kv_policy": "kara"}
    assert server.http.post("/v1/completions", json=body, headers=headers).is_success
    server.complete([97] * 600)
    wait_until(lambda: not server.state.generations)
    tracer.shutdown()
    *answered, refused = exporter.get_finished_spans()
    for span in answered:
        assert f"{span.context.trace_id:032x}" == TRACE
        for name in ("completion_tokens", "output_tokens"):
            assert span.attributes[f"gen_ai.usage.{name}"] == 16
        for name in ("prompt_tokens", "input_tokens"):
            assert span.attributes[f"gen_ai.usage.{name}"] == 2
        assert span.attributes["gen_ai.request.choice.count"] == 1
        assert span.attributes["gen_ai.request.model"] == MODEL
        assert span.attributes["kvserve.policy"] == "kara"
        assert span.attributes["kvserve.compactions"] == len(span.events) == 2
        for event in span.events:
            assert event.name == "kvserve.compaction"
            assert span.start_time <= event.timestamp <= span.end_time
            assert event.attributes["kvserve.reason"] == "due"
            assert event.attributes["kvserve.evicted_tokens"] == 8
    assert len(answered) == 2
    assert "gen_ai.usage.completion_tokens" not in refused.attributes


@pytest.mark.parametrize("absent", ["opentelemetry.sdk.trace", "opentelemetry.exporter"])
def test_without_the_extra(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages bring a part of it."""
    monkeypatch.setitem(__import__("sys").modules, absent, None)
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
        Tracer("http://localhost:4317", MODEL)
