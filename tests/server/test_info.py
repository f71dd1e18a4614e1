"""Routes about the server and for those who operate it: health, models, tokenizer, metrics, the KV
cache, aborts; and that the dashboard and the alerts in ``deploy`` name series that there are."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvserve.config import EngineConfig
from kvserve.server.http import info_routes
from kvserve.stats import STATS, CompactionCounts, EngineStats, RequestStats
from tests.server.conftest import MODEL, RunningServer, StartServer
from tests.server.fake_engine import BOS, FakeEngine
from tests.waiting import WAIT, wait_until

COUNTS: dict[str, Any] = {name: 1000 + place for place, name in enumerate(STATS)}
COUNTS |= {"blocks_total": 100, "blocks_free": 60, "blocks_cached": 10}
STATE = EngineStats(
    **COUNTS | {"tokens_logical": 1000, "tokens_held": 250},
    compaction_counts=(
        CompactionCounts("kara", "due", 3, 4),
        CompactionCounts("kara", "pressure", 1, 1),
        CompactionCounts("snapkv", "due", 1, 1),
    ),
    iterations=(2, 0, 3, *(0,) * 10, 1),
    iteration_tokens_total=40000,
    requests=(RequestStats("r", "kara", 1000, 250, 30, 5),),
)
"""Its counts differ, so that none is shown as another."""


def scrape(server: RunningServer) -> dict[str, float]:
    """Samples by name, with the labels that are not on every series."""
    values = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = {
                k: v for k, v in sample.labels.items() if k not in ("model_name", "engine", "le")
            }
            if ":" in sample.name:
                assert sample.labels["model_name"] == MODEL
                assert sample.labels.get("engine") == (None if "state" in labels else "0")
            values[sample.name + "".join(f"|{value}" for value in labels.values())] = sample.value
    return values


def test_health_and_version(server: RunningServer) -> None:
    assert server.http.get("/health").json() == {"status": "ok"}
    assert server.http.get("/ping").status_code == 200
    assert server.http.get("/version").json() == {"version": "0.1.0"}
    wrong = server.http.post("/version")
    assert wrong.status_code == 405 and wrong.headers["Allow"] == "GET, HEAD"
    said = "POST /version is not allowed; use GET or HEAD"
    assert wrong.json()["error"]["message"] == said


def test_models(server: RunningServer) -> None:
    models = server.openai().models.list().data
    assert [model.id for model in models] == [MODEL, "alias"]
    card = server.http.get(f"/v1/models/{MODEL}").json()
    assert card["max_model_len"] == 512
    assert (card["root"], card["owned_by"], card["object"]) == (MODEL, "kvserve", "model")
    assert server.openai().models.retrieve(MODEL).id == MODEL


def test_tokenize_and_detokenize(server: RunningServer) -> None:
    for prefix in ("", "/v1"):
        answer = server.post(f"{prefix}/tokenize", prompt="ab", return_token_strs=True).json()
        assert answer == {
            "count": 3,
            "max_model_len": 512,
            "tokens": [BOS, 97, 98],
            "token_strs": ["\x01", "a", "b"],
        }
        answer = server.post(f"{prefix}/detokenize", tokens=[97, 98]).json()
        assert answer == {"prompt": "ab"}
    answer = server.post("/tokenize", prompt="ab", add_special_tokens=False).json()
    assert answer["tokens"] == [97, 98]
    messages = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    body: dict[str, Any] = {"messages": messages, "tools": tools, "add_generation_prompt": False}
    assert server.post("/tokenize", **body).json()["count"] == len("<user>a")
    assert server.rendered[1]["tools"] == tools


def test_metrics_of_the_engine(start_server: StartServer) -> None:
    config = EngineConfig.from_flat(model=MODEL, policy="kara", policy_args={"window": 32})
    values = scrape(start_server(FakeEngine(stats=STATE), config=config))
    for name, stat in STATS.items():
        if stat.metric:
            series, count = stat.metric + "_total" * stat.counts, getattr(STATE, name)
            assert values[f"kvserve:{series}"] == count, name
            assert values.get(f"vllm:{series}") == (count if stat.vllm else None), name
    common = {
        "kv_cache_usage_perc": 0.3,
        "prefix_cache_queries_total": 0,
        "prefix_cache_hits_total": 0,
        "request_success_total|stop": 0,
        "time_to_first_token_seconds_count": 0,
        "iteration_tokens_total_sum": 40000,
        "iteration_tokens_total_count": 6,
        'cache_config_info|auto|auto|100|kara|{"window": 32}': 1,
    }
    own = {
        "kv_compression_ratio": 0.25,
        "kv_admission_headroom_blocks": 70,
        "kv_compactions_total|kara|due": 3,
        "kv_compactions_total|kara|pressure": 1,
        "kv_compactions_total|snapkv|due": 1,
        "kv_blocks_released_total|kara": 5,
        "kv_blocks_released_total|snapkv": 1,
    }
    for name, value in (common | own).items():
        assert values[f"kvserve:{name}"] == pytest.approx(value), name
        assert values.get(f"vllm:{name}") == (values[f"kvserve:{name}"] if name in common else None)


@pytest.mark.parametrize("caches", [True, False])
def test_prefix_queries_are_counted_if_an_engine_looks(
    caches: bool, start_server: StartServer
) -> None:
    """One may not, whatever it was told: a model whose layers keep states."""
    server = start_server(FakeEngine(prefix_caching=caches))
    server.complete("abcd", max_tokens=2)
    assert bool(scrape(server)["kvserve:prefix_cache_queries_total"]) == caches


def test_metrics_of_requests(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    server.complete(["a", "b"], max_tokens=20, kv_policy="kara")
    server.chat("a", max_tokens=4, stream=True)
    server.complete([97] * 600)
    values = scrape(server)
    assert values["kvserve:request_success_total|length"] == 3
    assert values["kvserve:request_success_total|abort"] == 0
    assert values["kvserve:time_to_first_token_seconds_count"] == 3
    assert values["kvserve:inter_token_latency_seconds_count"] == 19 + 19 + 3
    for name in ("queue", "prefill", "decode", "inference"):
        assert values[f"kvserve:request_{name}_time_seconds_count"] == 3
        assert values[f"vllm:request_{name}_time_seconds_count"] == 3
    assert values["kvserve:request_time_per_output_token_seconds_count"] == 3
    assert values["kvserve:e2e_request_latency_seconds_count"] == 3
    assert values["kvserve:request_generation_tokens_sum"] == 44
    assert values["kvserve:request_params_max_tokens_sum"] == 44
    assert values["kvserve:kv_compactions_total|none|due"] == 0
    assert values["http_requests_total|/v1/completions|POST|2xx"] == 1
    assert values["http_requests_total|/v1/completions|POST|4xx"] == 1
    assert values["http_request_duration_seconds_count|/v1/chat/completions|POST"] == 1
    assert not [name for name in values if name.endswith("_created")]


def test_requests_that_do_not_finish_are_counted(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    body = {"prompt": "HALF", "stream": True, "max_tokens": 100}
    with server.http.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
    server.complete("BUG")
    wait_until(lambda: scrape(server)["kvserve:request_success_total|abort"] == 1)
    assert scrape(server)["kvserve:request_success_total|error"] == 1


def test_answers_are_counted_by_route(start_server: StartServer) -> None:
    server = start_server(FakeEngine(), api_key=("k",))
    headers = {"Authorization": "Bearer k"}
    server.http.headers.update(headers)
    server.http.get("/v1/models/alias")
    server.http.get("/v1/models/nobody")
    server.http.get("/v1/nowhere")
    server.http.get("/v1/nowhere/else")
    server.http.get("/health")
    server.http.get("/v1/models", headers={"Authorization": ""})
    found = {k: v for k, v in scrape(server).items() if k.startswith("http_requests_total")}
    assert found == {
        "http_requests_total|/v1/models/{name:path}|GET|2xx": 1,
        "http_requests_total|/v1/models/{name:path}|GET|4xx": 1,
        "http_requests_total|none|GET|4xx": 3,
    }


def test_the_mirror_may_be_switched_off(start_server: StartServer) -> None:
    text = start_server(vllm_metrics=False).http.get("/metrics").text
    assert "kvserve:" in text and "vllm:" not in text


def test_kv_stats(start_server: StartServer) -> None:
    shown = start_server(FakeEngine(stats=STATE)).http.get("/v1/kv/stats").json()
    for name, stat in STATS.items():
        group, _, key = stat.shown.rpartition(".")
        found = (shown[group] if group else shown).get(key)
        is_there = stat.shown and not stat.for_page
        assert found == (getattr(STATE, name) if is_there else None), name
    [request] = shown["requests"]
    assert (request["request_id"], request["policy"], request["held_tokens"]) == ("r", "kara", 250)


def test_kv_policies(server: RunningServer) -> None:
    answer = server.http.get("/v1/kv/policies").json()
    assert answer["default"] == "none"
    kara = {policy["name"]: policy for policy in answer["data"]}["kara"]
    assert kara["cost"] and kara["avoid"] and kara["summary"]
    schema = kara["schema"]
    assert schema["additionalProperties"] is False and schema["required"] == ["name"]
    assert schema["properties"]["name"] == {"const": "kara"}
    window, reduce = (schema["properties"][name] for name in ("window", "query_reduce"))
    assert (window["type"], window["default"], window["minimum"]) == ("integer", 512, 1)
    assert window["description"] and reduce["enum"] == ["heads", "group_mean"]


def test_the_document_has_every_detail_of_the_cache(server: RunningServer) -> None:
    described = server.http.get("/openapi.json").json()["components"]["schemas"]["KVCacheDetails"]
    answer = server.http.post("/v1/completions", json={"model": MODEL, "prompt": [1, 2]}).json()
    details = answer["usage"]["kv_cache_details"]
    assert described["properties"].keys() == details.keys() == set(described["required"])
    assert all(field["description"] for field in described["properties"].values())


def test_health_generate(start_server: StartServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(FakeEngine())
    assert server.http.get("/health_generate").json() == {"status": "ok"}
    [(ids, params, _)] = server.engine.seen
    assert (len(ids), params.max_tokens) == (1, 1)

    async def hang(*args: Any, **kwargs: Any) -> Any:
        import asyncio

        await asyncio.sleep(3600)

    monkeypatch.setattr(info_routes, "_PROBE_SECONDS", 0.1)
    monkeypatch.setattr(info_routes.Generation, "_settled", hang)
    response = server.http.get("/health_generate")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_stuck"
    wait_until(lambda: not server.state.generations)


def test_load_and_abort(start_server: StartServer) -> None:
    server = start_server(FakeEngine())
    with ThreadPoolExecutor(3) as clients:
        one, two, three = (
            clients.submit(server.complete, "HALF", request_id=name)
            for name in ("one", "two", "three")
        )
        wait_until(lambda: server.http.get("/load").json()["server_load"] == 3)
        assert server.http.get("/load").json()["num_requests_running"] == 3
        aborted = server.post("/abort_requests", request_ids=["one", "cmpl-two", "nobody"]).json()
        assert sorted(aborted["aborted"]) == ["cmpl-one", "cmpl-two"]
        codes = {each.result(WAIT).json()["error"]["code"] for each in (one, two)}
        assert codes == {"aborted"} and not three.done()
        wait_until(lambda: len(server.engine.aborted) == 2)
        server.post("/abort_requests", request_ids=["three"])


def test_prefix_cache_and_tokenizer(server: RunningServer) -> None:
    before = server.engine.resets
    for path in ("/reset_prefix_cache", "/flush_cache"):
        assert server.post(path).json() == {"status": "ok"}
    assert server.engine.resets == before + 2
    assert server.http.get("/tokenizer_info").json()["chat_template"] == "fake"


def test_fingerprints(start_server: StartServer) -> None:
    server = start_server(FakeEngine())

    def fingerprint(**body: Any) -> str:
        found: str = server.complete("a", max_tokens=1, **body).json()["system_fingerprint"]
        return found

    assert fingerprint() == fingerprint(kv_policy="none") == fingerprint(seed=3)
    assert fingerprint() != fingerprint(kv_policy="kara")
    assert fingerprint(kv_policy={"name": "kara", "window": 64}) != fingerprint(kv_policy="kara")
    chunk = next(iter(server.openai().completions.create(model=MODEL, prompt="a", stream=True)))
    assert chunk.system_fingerprint == fingerprint()


ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = ROOT / "deploy" / "grafana" / "dashboards"
SERIES = r"kvserve:\w+|http_requests_total|process_\w+"


def test_every_series_exists(server: RunningServer) -> None:
    server.complete("a", max_tokens=3)
    text = server.http.get("/metrics").text
    served = {re.split("[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    dashboard = json.loads((DASHBOARDS / "kvserve.json").read_text())
    alerts = (ROOT / "deploy" / "helm" / "files" / "alerts.yaml").read_text()
    assert len(found := set(re.findall(SERIES, alerts))) > 3 and found <= served
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(SERIES, target["expr"]):
                assert name in served, (panel["title"], name)
            # Of two servers one sees which is which, unless their sum is what is shown.
            summed = "sum by" in target["expr"] and "by (instance)" not in target["expr"]
            assert summed or "{{instance}}" in target["legendFormat"], panel["title"]
            assert 'instance=~"$instance"' in target["expr"], panel["title"]


def test_the_log_of_requests_has_sizes(
    start_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    """It had salts, stop strings and whole grammars."""
    server = start_server(enable_log_requests=True)
    secret = {
        "cache_salt": "SECRET-salt",
        "stop": ["SECRET-stop", "b"],
        "structured_outputs": {"regex": "(SECRET-regex)?"},
        "user": "SECRET-user",
        "logit_bias": {"5": 1},
        "temperature": 0.5,
        "kv_policy": {"name": "streaming_llm", "budget": 64},
    }
    with caplog.at_level("INFO", "kvserve"):
        answer = server.complete("SECRET-prompt", max_tokens=3, **secret)
        assert answer.status_code == 200, answer.text
        server.complete("a", kv_policy="no\nsuch", bad_words=["SECRET-word"])
    [said, other] = [r.getMessage() for r in caplog.records if "prompts of" in r.getMessage()]
    assert "SECRET" not in caplog.text and "\n" not in other and "bad_words=(1)" in other
    for part in (
        *("prompts of [14] tokens", "temperature=0.5", "max_tokens=3", "cache_salt=(11)"),
        *("stop=(2)", "structured_outputs=regex of 15", "logit_bias=(1)"),
        "kv_policy='streaming_llm'",
    ):
        assert part in said
