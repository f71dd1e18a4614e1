"""The dashboard in ``deploy`` asks for series that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.server.conftest import RunningServer

DASHBOARDS = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "dashboards"


def test_every_series_exists(server: RunningServer) -> None:
    server.complete("a", max_tokens=3)
    text = server.http.get("/metrics").text
    served = {line.partition("{")[0] for line in text.splitlines() if not line.startswith("#")}
    dashboard = json.loads((DASHBOARDS / "kvserve.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 15
    for panel in panels:
        for target in panel["targets"]:
            for name in re.findall(r"kvserve:\w+", target["expr"]):
                assert name in served, (panel["title"], name)
