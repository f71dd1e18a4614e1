"""The dashboard and the alerts in ``deploy`` name series that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.server.conftest import RunningServer

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
