"""Prometheus itself: it reads our files, and a running server gives it what the dashboard shows."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.acceptance.conftest import ROOT, run_tool, tool
from tests.server.real_server import Server
from tests.waiting import WAIT, wait_until

pytestmark = pytest.mark.slow
ALERTS = ROOT / "deploy" / "helm" / "files" / "alerts.yaml"


def test_promtool_accepts_the_rules() -> None:
    run_tool("promtool", "check", "rules", str(ALERTS))


def test_alerts_fire_when_they_should_and_only_then() -> None:
    run_tool("promtool", "test", "rules", str(Path(__file__).parent / "alerts_test.yaml"))


@pytest.fixture
def prometheus(server: Server, tmp_path: Path) -> Iterator[httpx.Client]:
    """A Prometheus with deploy/prometheus.yaml: the target is ``server``, asked every second."""
    program = tool("prometheus")
    config = yaml.safe_load((ROOT / "deploy" / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server.url.removeprefix("http://")]}]
    config["global"]["scrape_interval"] = config["global"]["evaluation_interval"] = "1s"
    config["rule_files"] = [str(ALERTS)]
    file = tmp_path / "prometheus.yaml"
    file.write_text(yaml.safe_dump(config))
    run_tool("promtool", "check", "config", str(file))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    process = subprocess.Popen(
        [
            *(program, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}"),
            f"--web.listen-address={address}",
        ],
        stderr=(tmp_path / "log").open("w"),
    )
    with httpx.Client(base_url=f"http://{address}/api/v1", timeout=WAIT) as client:
        try:
            wait_until(lambda: process.poll() is not None or _answers(client))
            assert process.poll() is None, (tmp_path / "log").read_text()
            yield client
        finally:
            process.terminate()
            process.wait()


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/status/buildinfo").is_success
    except httpx.ConnectError:
        return False


def ask(prometheus: httpx.Client, query: str) -> list[Any]:
    answer = prometheus.get("/query", params={"query": query})
    assert answer.is_success, (query, answer.text)
    found: list[Any] = answer.json()["data"]["result"]
    return found


def test_a_server_gives_what_the_dashboard_shows(server: Server, prometheus: httpx.Client) -> None:
    wait_until(lambda: [each["value"][1] for each in ask(prometheus, "up")] == ["1"])
    assert server.http.get("/v1/models/nobody").status_code == 404

    def counted() -> bool:
        server.complete("<|user|> Let", max_tokens=40)
        busy = ask(prometheus, "rate(kvserve:generation_tokens_total[30s]) > 0")
        return bool(busy and ask(prometheus, 'rate(http_requests_total{status="4xx"}[30s])'))

    wait_until(counted)
    state = ask(prometheus, "kvserve:server_state == 1")
    assert [each["metric"]["state"] for each in state] == ["ready"]
    file = ROOT / "deploy" / "grafana" / "dashboards" / "kvserve.json"
    panels = json.loads(file.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(queries) > 35
    for query in queries:
        plain = query.replace("$__rate_interval", "30s")
        plain = plain.replace('"$model"', '".*"').replace('"$instance"', '".*"')
        assert not re.search(r"\$\w", plain), query
        # Nobody has got a 5xx yet; everything else has a value.
        assert ask(prometheus, plain) or 'status="5xx"' in query, query
    rules = prometheus.get("/rules").json()["data"]["groups"][0]["rules"]
    wanted = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in wanted}
    assert {rule["health"] for rule in rules} == {"ok"}, rules
    assert {rule["name"] for rule in rules if rule["state"] != "inactive"} == set()
