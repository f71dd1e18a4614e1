"""The Dockerfile by hadolint; the chart by Helm, and what it makes by Kubernetes' own schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.acceptance.conftest import ROOT, RunClient, run_tool, tool
from tests.deploy.chart import CHART
from tests.deploy.value_sets import VALUE_SETS, WRONG

pytestmark = pytest.mark.slow
OF_THE_OPERATOR = ("ServiceMonitor", "PrometheusRule")
"""Kinds that a cluster knows only with the Prometheus operator."""


def valid(objects: list[Any], folder: Path) -> bool:
    """Whether Kubernetes takes them all."""
    file = folder / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    done = run_tool("kubernetes-validate", "--strict", str(file))
    return (done.stdout + done.stderr).count("passed for resource") == len(objects)


def test_hadolint_finds_nothing() -> None:
    run_tool("hadolint", "Dockerfile")


@pytest.fixture(scope="module")
def helm(run_client: RunClient, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tool("kubernetes-validate")
    sets = tmp_path_factory.mktemp("helm") / "sets.json"
    sets.write_text(json.dumps(VALUE_SETS | WRONG))
    found: dict[str, Any] = run_client("helm_client", str(CHART), str(sets))
    return found


def test_helm_lints_the_chart(helm: dict[str, Any]) -> None:
    assert helm["version"].startswith("v4.")
    assert helm["lint"]["total_charts_linted"] == 1 and not helm["lint"]["errors"]
    assert all(message["severity"] <= 1 for message in helm["lint"]["messages"]), helm["lint"]


def _objects(texts: dict[str, str]) -> dict[str, Any]:
    read = {file: yaml.safe_load(text) for file, text in texts.items() if file.endswith(".yaml")}
    return {file: each for file, each in read.items() if each}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_kubernetes_takes_what_helm_makes(helm: dict[str, Any], name: str, tmp_path: Path) -> None:
    objects = _objects(helm["sets"][name]["texts"])
    known = [each for each in objects.values() if each["kind"] not in OF_THE_OPERATOR]
    assert len(known) >= 3 and valid(known, tmp_path)


@pytest.mark.parametrize("word", WRONG)
def test_helm_refuses_a_typo(helm: dict[str, Any], word: str) -> None:
    assert word in helm["sets"][word]["error"]


def test_kubernetes_takes_the_network_policy_of_ray(tmp_path: Path) -> None:
    _, policy = yaml.safe_load_all((ROOT / "deploy" / "ray" / "kuberay.yaml").read_text())
    assert valid([policy], tmp_path)
