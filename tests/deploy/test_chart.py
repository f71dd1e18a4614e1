"""The Helm chart: settings that kvserve reads, probes on routes that it has, time enough to end."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvserve.config import EngineConfig
from kvserve.server.cli import serve
from kvserve.server.settings.args import Parser
from kvserve.server.settings.reading import read_settings
from kvserve.server.settings.serve_settings import ServeSettings
from tests.deploy.chart import CHART, render

LONG: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "policy": {"name": "kara", "args": {"window": 512, "ratio": 0.5}},
    "pool": {"dtype": "k8v4", "memory": "5GiB"},
    "gpus": 2,
    "settings": {"max-num-seqs": 64, "max-model-len": "16k", "reasoning-parser": "deepseek_r1"},
    "shutdown": {"preStopSeconds": 5, "timeout": 120},
    "apiKey": {"secret": "keys"},
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "ingress": {"enabled": True, "host": "llm.acme.org", "tlsSecret": "acme"},
    "networkPolicy": {"enabled": True, "from": [{"podSelector": {"matchLabels": {"app": "web"}}}]},
    "hubToken": {"secret": "hub"},
    "models": {"claim": "weights"},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "nodeSelector": {"gpu": "h100"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
}


def of(kind: str, **changes: Any) -> dict[str, Any]:
    (found,) = [item for item in render(**changes) if item["kind"] == kind]
    return found


def pod(**changes: Any) -> dict[str, Any]:
    spec: dict[str, Any] = of("Deployment", **changes)["spec"]["template"]["spec"]
    return spec


def container(**changes: Any) -> dict[str, Any]:
    (found,) = pod(**changes)["containers"]
    made: dict[str, Any] = found
    return made


def read(tmp_path: Path, **changes: Any) -> tuple[EngineConfig, ServeSettings]:
    """The settings that a pod's kvserve reads."""
    file = tmp_path / "server.yaml"
    file.write_text(of("ConfigMap", **changes)["data"]["server.yaml"])
    parser = Parser(prog="kvserve serve")
    serve.add_arguments(parser)
    args: argparse.Namespace = parser.parse(["--config", str(file)])
    return read_settings(args)


def test_kvserve_reads_the_settings(tmp_path: Path) -> None:
    config, settings = read(tmp_path, **LONG)
    assert config.model.model == LONG["model"] and config.model.max_model_len == 16_000
    assert config.compression.policy == "kara"
    assert config.compression.policy_args == {"window": 512, "ratio": 0.5}
    assert config.cache.kv_cache_dtype == "k8v4" and config.cache.kv_cache_memory == 5 * 2**30
    assert config.parallel.tensor_parallel_size == 2 and config.device == "cuda"
    assert settings.shutdown_timeout == 120 and settings.reasoning_parser == "deepseek_r1"
    assert (settings.host, settings.port) == ("0.0.0.0", 8000)


def test_defaults_and_a_cpu(tmp_path: Path) -> None:
    config, _ = read(tmp_path)
    assert config.device == "cuda" and config.cache.kv_cache_memory is None
    config, _ = read(tmp_path, gpus=0)
    assert config.device == "cpu"
    assert "nvidia.com/gpu" not in container(gpus=0)["resources"]["limits"]
    assert container()["resources"]["limits"]["nvidia.com/gpu"] == 1


@pytest.mark.parametrize("changes", [{}, LONG, {"shutdown": {"timeout": 600}}])
def test_requests_end_before_the_pod_is_killed(tmp_path: Path, changes: dict[str, Any]) -> None:
    _, settings = read(tmp_path, **changes)
    _, waits = container(**changes)["lifecycle"]["preStop"]["exec"]["command"]
    grace = pod(**changes)["terminationGracePeriodSeconds"]
    assert grace >= int(waits) + settings.shutdown_timeout + 5  # answers leave


def test_probes() -> None:
    made = container()
    assert made["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert made["readinessProbe"]["httpGet"]["path"] == "/health"
    startup = made["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 1800
    # A server that drains says 503 to /health: who kills it for that loses its requests.
    assert made["livenessProbe"]["httpGet"]["path"] == "/version"


def test_labels_select_the_pods() -> None:
    deployment, service = of("Deployment"), of("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    monitor = of("ServiceMonitor", **LONG)["spec"]
    assert monitor["selector"]["matchLabels"] == labels == service["metadata"]["labels"]


def test_keys_are_secrets() -> None:
    assert "env" not in container()
    env = {item["name"]: item["valueFrom"]["secretKeyRef"] for item in container(**LONG)["env"]}
    assert env["KVSERVE_API_KEY"] == {"name": "keys", "key": "api-key"}
    assert env["HF_TOKEN"] == {"name": "hub", "key": "token"}
    (endpoint,) = of("ServiceMonitor", **LONG)["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics"
    # One key: the entry with all of them may have commas, which no bearer has.
    assert endpoint["authorization"]["credentials"] == {"name": "keys", "key": "scrape-key"}


def test_new_settings_start_new_pods() -> None:
    def mark(**changes: Any) -> str:
        metadata = of("Deployment", **changes)["spec"]["template"]["metadata"]
        found: str = metadata["annotations"]["kvserve/settings"]
        return found

    assert mark() == mark() != mark(policy={"name": "none"})


def test_volumes_and_places() -> None:
    volumes = {volume["name"]: volume for volume in pod(**LONG)["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "weights"}
    assert volumes.keys() == {mount["name"] for mount in container(**LONG)["volumeMounts"]}
    assert pod(**LONG)["nodeSelector"] == {"gpu": "h100"}
    assert pod(**LONG)["tolerations"] == LONG["tolerations"]
    assert "ServiceMonitor" not in {item["kind"] for item in render()}


def test_the_chart_says_what_it_is() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["apiVersion"] == "v2" and chart["name"] == "kvserve"


def test_a_server_without_keys_answers_to_the_names_of_its_service(tmp_path: Path) -> None:
    """Else all clients in the cluster would get a 403."""
    _, settings = read(tmp_path, ingress={"enabled": True}, allowedHosts=["gateway.internal"])
    service = of("Service")["metadata"]["name"]
    names = {f"{service}{end}" for end in ("", ".models", ".models.svc")}
    assert names < set(settings.allowed_hosts)
    assert {"llm.example.org", "gateway.internal"} < set(settings.allowed_hosts)
    assert read(tmp_path)[1].allowed_hosts[-1] == f"{service}.models.svc.cluster.local"
    assert read(tmp_path, **LONG)[1].allowed_hosts == ()


def test_a_pod_may_do_little() -> None:
    spec, security = pod(), container()["securityContext"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    assert security["readOnlyRootFilesystem"] and security["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["mountPath"] for mount in container()["volumeMounts"]}
    assert {"/tmp", "/home/kvserve", "/data/huggingface", "/dev/shm"} < mounts  # what is written


def test_ingress_and_network_policy() -> None:
    assert not {"Ingress", "NetworkPolicy", "PrometheusRule"} & {each["kind"] for each in render()}
    ingress = of("Ingress", **LONG)
    assert (
        ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    )
    (rule,), (tls,) = ingress["spec"]["rules"], ingress["spec"]["tls"]
    assert rule["host"] == "llm.acme.org" and tls == {
        "hosts": ["llm.acme.org"],
        "secretName": "acme",
    }
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend == {"name": of("Service")["metadata"]["name"], "port": {"name": "http"}}
    policy = of("NetworkPolicy", **LONG)["spec"]
    labels = of("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [
        {"ports": [{"port": "http"}], "from": LONG["networkPolicy"]["from"]}
    ]
    own = of("NetworkPolicy", networkPolicy={"enabled": True})["spec"]["ingress"][0]["from"]
    assert own == [{"podSelector": {}}]


def test_alerts_come_with_the_chart() -> None:
    rules = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    made = of("PrometheusRule", **LONG)
    assert made["spec"] == rules and made["metadata"]["labels"]["release"] == "prometheus"
    for rule in rules["groups"][0]["rules"]:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}


def test_scrape_configuration_asks_the_route() -> None:
    scrape = yaml.safe_load((CHART.parent / "prometheus.yaml").read_text())
    (job,) = scrape["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["static_configs"][0]["targets"][0].endswith(":8000")
