"""The Helm chart: settings that kvserve reads, probes on routes that it has, time enough to end.

What Helm has to render is skipped without it: `make acceptance` has it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvserve.config import SETTINGS, EngineConfig
from kvserve.server.cli import serve
from kvserve.server.settings.args import Parser
from kvserve.server.settings.reading import read_settings
from kvserve.server.settings.serve_settings import ServeSettings
from tests.deploy.chart import CHART, render, texts
from tests.deploy.value_sets import LONG, NUMBERS, PRIVATE, SPREAD, SURGE, VALUE_SETS, WRONG

SCHEMA = json.loads((CHART / "values.schema.json").read_text())


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
    jsonschema.validate(changes, SCHEMA)
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


def test_keys_are_secrets(tmp_path: Path) -> None:
    assert "env" not in container()
    (hub,) = container(**LONG)["env"]
    assert hub["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    # As a file, which a changed secret replaces: an environment variable would need a restart.
    volumes = {volume["name"]: volume for volume in pod(**PRIVATE)["volumes"]}
    secret = {"secretName": "keys", "items": [{"key": "all.txt", "path": "api-keys"}]}
    assert volumes["keys"]["secret"] == secret
    (mount,) = [each for each in container(**PRIVATE)["volumeMounts"] if each["name"] == "keys"]
    _, settings = read(tmp_path, **PRIVATE)
    assert settings.api_key_file == f"{mount['mountPath']}/api-keys" and "subPath" not in mount
    assert "Authorization: Bearer $KEY" in texts(**PRIVATE)["NOTES.txt"]
    assert r"{.data.all\.txt}" in texts(**PRIVATE)["NOTES.txt"]
    assert "Bearer" not in texts()["NOTES.txt"]
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
    assert mark() == mark(replicas=3), "more replicas are no reason to restart those that run"


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


def strategy(**changes: Any) -> Any:
    return of("Deployment", **changes)["spec"]["strategy"]


def test_an_upgrade_leaves_others_running() -> None:
    """A GPU that is taken cannot start a second pod; without others there is nothing to leave."""
    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert strategy() == {"type": "Recreate"}
    assert strategy(**SPREAD) == strategy(replicas=2) == one_by_one
    assert strategy(autoscaling={"enabled": True}) == one_by_one
    assert strategy(gpus=0)["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert strategy(**SURGE) == SURGE["strategy"]
    spec = of("Deployment")["spec"]
    startup = spec["template"]["spec"]["containers"][0]["startupProbe"]
    loading = startup["periodSeconds"] * startup["failureThreshold"]
    assert spec["progressDeadlineSeconds"] > loading, "who loads has not failed"


def test_a_drained_node_takes_one_replica() -> None:
    assert "PodDisruptionBudget" not in {each["kind"] for each in render()}
    budget = of("PodDisruptionBudget", replicas=2)["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == of("Deployment", replicas=2)["spec"]["selector"]
    assert of("PodDisruptionBudget", **SPREAD)["spec"]["maxUnavailable"] == "50%"


def test_requests_that_wait_bring_replicas() -> None:
    scaled = {"autoscaling": {"enabled": True, "maxReplicas": 5}}
    deployment, scaler = of("Deployment", **scaled), of("HorizontalPodAutoscaler", **scaled)["spec"]
    assert "replicas" not in deployment["spec"], "each upgrade would set it back"
    assert scaler["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 5)
    pods = scaler["metrics"][0]["pods"]
    (rule,) = yaml.safe_load((CHART.parent / "prometheus-adapter.yaml").read_text())["rules"][
        "custom"
    ]
    assert pods["metric"]["name"] == rule["name"]["as"]
    assert rule["seriesQuery"].startswith("kvserve:num_requests_waiting{")


def test_numbers_are_texts_where_kubernetes_wants_texts(tmp_path: Path) -> None:
    config, _ = read(tmp_path, **{**NUMBERS, "model": "kvserve/tiny"})
    assert config.cache.kv_cache_memory == 5368709120
    assert config.scheduler.max_num_batched_tokens == 16777216
    written = of("ConfigMap", **NUMBERS)["data"]["server.yaml"]
    assert 'kv-cache-memory: "5368709120"\n' in written and 'model: "7"\n' in written
    spec, made = pod(**NUMBERS), container(**NUMBERS)
    assert made["image"] == "kvserve:20261126" and spec["nodeSelector"] == {"gpus": "8"}
    assert {each["name"]: each["value"] for each in made["env"]} == {
        "SECONDS": "1500000",
        "SHARE": "0.5",
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["shared-memory"]["emptyDir"]["sizeLimit"] == "8589934592"
    annotations = of("Deployment", **NUMBERS)["spec"]["template"]["metadata"]["annotations"]
    assert (annotations["build"], annotations["reviewed"]) == ("20261126", "true")
    timeout = "nginx.ingress.kubernetes.io/proxy-read-timeout"
    assert of("Ingress", **NUMBERS)["metadata"]["annotations"][timeout] == "7200"


@pytest.mark.parametrize("values", VALUE_SETS.values(), ids=VALUE_SETS)
def test_all_objects_have_the_charts_name(values: dict[str, Any]) -> None:
    jsonschema.validate(values, SCHEMA)
    name = "chat" if values is PRIVATE else "llm-kvserve"
    objects = render(**values)
    assert {each["metadata"]["name"] for each in objects} == {name}
    assert {"Deployment", "Service", "ConfigMap"} <= {each["kind"] for each in objects}


def test_what_a_private_cluster_needs() -> None:
    spec, made = pod(**PRIVATE), container(**PRIVATE)
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert spec["serviceAccountName"] == "serving" and not spec["automountServiceAccountToken"]
    assert (spec["runtimeClassName"], spec["priorityClassName"]) == ("nvidia", "high")
    assert made["env"] == PRIVATE["extraEnv"]
    assert PRIVATE["extraVolumes"][0] in spec["volumes"]
    assert PRIVATE["extraVolumeMounts"][0] in made["volumeMounts"]
    assert pod(**SPREAD)["affinity"] == SPREAD["affinity"]
    assert pod(**SPREAD)["topologySpreadConstraints"] == SPREAD["topologySpreadConstraints"]
    # Alerts look for the job, which would be the service's name.
    assert of("ServiceMonitor", **PRIVATE)["spec"]["jobLabel"] == "app.kubernetes.io/name"


def test_the_schema_knows_every_value_and_no_other() -> None:
    def names(schema: dict[str, Any], values: Any, at: str) -> None:
        if "properties" not in schema or not isinstance(values, dict):
            return
        assert schema["additionalProperties"] is False, at
        for key, value in values.items():
            assert key in schema["properties"], f"{at}.{key}"
            names(schema["properties"][key], value, f"{at}.{key}")

    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, SCHEMA)
    names(SCHEMA, values, "")
    assert SCHEMA["properties"].keys() == {*values, "global"}


@pytest.mark.parametrize(("word", "values"), WRONG.items(), ids=WRONG)
def test_a_typo_is_an_error(word: str, values: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError, match=word) as error:
        jsonschema.validate(values, SCHEMA)
    assert word in f"{error.value.json_path} {error.value.message}"


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        *(("kv-cache-dtype", "pool.dtype"), ("kv_cache_dtype", "pool.dtype")),
        *(("policy.window", "policy.args"), ("policy", "policy.name"), ("port", "service.port")),
        *(("tensor-parallel-size", "gpus"), ("allowed-hosts", "allowedHosts")),
    ],
)
def test_a_setting_is_given_once(key: str, instead: str) -> None:
    with pytest.raises(ValueError, match=f"settings.{key}: the chart writes it; give {instead}"):
        render(settings={key: "k8v4"})


def test_the_chart_refuses_what_it_writes_itself() -> None:
    for values in ({"gpus": 0}, LONG):
        own = yaml.safe_load(of("ConfigMap", **{**values, "settings": {}})["data"]["server.yaml"])
        for key in own:
            with pytest.raises(ValueError, match="the chart writes it"):
                render(**{**values, "settings": {key: "a"}})


def test_every_kv_cache_dtype_is_named() -> None:
    (line,) = [one for one in (CHART / "values.yaml").read_text().splitlines() if "dtype:" in one]
    named = line.partition("stored as: ")[2].split(", ")
    assert sorted(named) == sorted(SETTINGS["kv_cache_dtype"].choices or ())


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
