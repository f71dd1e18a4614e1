"""guidellm waits for /health, asks /v1/models for the model, and counts what streams tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvserve
from tests.acceptance.conftest import run_tool
from tests.server.real_server import Server

pytestmark = pytest.mark.slow
TOKENIZER = Path(kvserve.__file__).parent / "data" / "tiny"


@pytest.mark.parametrize("profile", ["kind=concurrent,streams=4", "kind=poisson,rate=20"])
def test_every_request_is_counted(server: Server, tmp_path: Path, profile: str) -> None:
    report = tmp_path / "report.json"
    run_tool(
        *("guidellm", "run", "--disable-console", "--profile", profile),
        *("--backend", f"kind=openai_http,target={server.url}"),
        *("--constraint", "kind=max_requests,count=12"),
        *("--tokenizer", f"kind=hf_auto,model={TOKENIZER}"),
        *("--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=16"),
        *("--output", f"kind=json,path={report}"),
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (12, 0)
    assert metrics["output_token_count"]["successful"]["mean"] == 16
    assert metrics["prompt_token_count"]["successful"]["mean"] >= 40
    assert metrics["inter_token_latency_ms"]["successful"]["mean"] > 0
