"""The whole thing: ``python -m kvserve`` with the shipped model, over HTTP, until SIGTERM."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import kvserve
from tests.server.real_server import MODEL, Server
from tests.waiting import wait_until

DIRECTORY = Path(kvserve.__file__).parent / "data" / "tiny"
pytestmark = pytest.mark.skipif(
    not (DIRECTORY / "config.json").exists(), reason="the shipped model is not here"
)


@pytest.fixture
def server(real_server: Server) -> Server:
    return real_server


LONG: dict[str, Any] = {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


def test_the_start_up_table(server: Server) -> None:
    for part in ("feature", "policy", "window 32", "kv pool", "prefix caching", f"serves {MODEL}"):
        assert part in server.text


def test_completion_compresses(server: Server) -> None:
    answer = server.openai.completions.create(model=MODEL, prompt="Hello", **LONG)
    assert answer.usage is not None and answer.usage.completion_tokens == 200
    assert answer.usage.model_extra is not None
    details = answer.usage.model_extra["kv_cache_details"]
    assert details["policy"] == "kara"
    assert details["compactions"] > 0
    assert details["blocks_released"] > 0
    assert details["evicted_tokens"] == details["logical_tokens"] - details["held_tokens"] > 0

    stream = server.openai.completions.create(
        model=MODEL, prompt="Hello", stream=True, stream_options={"include_usage": True}, **LONG
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].text
    assert chunks[-1].usage is not None and chunks[-1].usage.model_extra is not None
    assert chunks[-1].usage.model_extra["kv_cache_details"] == details


def test_operations(server: Server) -> None:
    assert server.http.get("/health_generate").status_code == 200
    prompt = "Hello " * 100
    server.complete(prompt, max_tokens=1, kv_policy="none")
    cached = server.complete(prompt, max_tokens=1, kv_policy="none").json()["usage"]
    assert cached["prompt_tokens_details"]["cached_tokens"] > 0
    assert server.http.post("/reset_prefix_cache").status_code == 200
    fresh = server.complete(prompt, max_tokens=1, kv_policy="none").json()["usage"]
    assert fresh["prompt_tokens_details"]["cached_tokens"] == 0
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|eos|>" and "assistant" in info["chat_template"]


def test_metrics_count_what_happened(server: Server) -> None:
    server.complete("Hello", max_tokens=400, ignore_eos=True, temperature=0).raise_for_status()
    wait_until(server.idle)
    text = server.http.get("/metrics").text
    stats = server.stats()
    for name, labels in (("compactions", 'policy="kara",reason="due"'), ("blocks_released", "")):
        counts = re.findall(rf"^kvserve:kv_{name}_total(\{{.*\}}) (\S+)$", text, re.M)
        assert any(labels in which for which, _ in counts)
        # Other tests have asked for other policies.
        assert sum(float(count) for _, count in counts) == stats[f"{name}_total"] > 0
    [steps] = re.findall(r"^vllm:iteration_tokens_total_count\S* (\S+)", text, re.M)
    assert float(steps) > 200
    for prefix in ("kvserve", "vllm"):
        [generated] = re.findall(rf"^{prefix}:generation_tokens_total\S* (\S+)", text, re.M)
        assert float(generated) > 300
    policies = server.http.get("/v1/kv/policies").json()
    assert policies["default"] == "kara"
    assert {"none", "kara"} <= {policy["name"] for policy in policies["data"]}
    info = server.http.get("/server_info").json()
    assert info["policy"]["args"]["window"] == 32


def test_many_at_once(server: Server) -> None:
    """More requests than the batch holds: all of them finish, with the same answer."""
    body = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "n": 4}
    with ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(server.complete, **body) for _ in range(20)]
    texts = [choice["text"] for each in asked for choice in each.result().json()["choices"]]
    assert len(texts) == 80 and len(set(texts)) == 1
    wait_until(server.idle)


def say(server: Server, prompt: list[int], **body: Any) -> tuple[list[int], dict[str, Any]]:
    """All tokens so far, and the usage."""
    settings = {"max_tokens": 100, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = server.complete(prompt, **settings, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return [*prompt, *found["choices"][0]["token_ids"]], found["usage"]


def test_a_second_turn_goes_on(server: Server) -> None:
    said, first = say(server, list(range(10, 60)))
    assert first["kv_cache_details"]["resumed_tokens"] == 0
    told, second = say(server, [*said, *range(20, 40)])
    details = second["kv_cache_details"]
    # All but the newest token of the first answer, whose entry was never computed.
    assert details["resumed_tokens"] == len(said) - 1
    assert second["prompt_tokens_details"]["cached_tokens"] == len(said) - 1
    assert details["compactions"] > first["kv_cache_details"]["compactions"] > 0
    assert details["held_tokens"] < details["logical_tokens"] == len(told) - 1
    stats = server.stats()["continuations"]
    assert stats["count"] and stats["blocks"]
    metrics = server.http.get("/metrics").text
    assert "kvserve:kv_resumed_total" in metrics and "kvserve:kv_continuations" in metrics
