"""Compose, the image and Ray's files: closed to strangers, and consistent with kvserve."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvserve
from kvserve.server.settings.reading import ENV_PREFIX, settings_from
from kvserve.server.settings.serve_settings import ServeSettings

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def load(name: str) -> Any:
    return next(yaml.safe_load_all((DEPLOY / name).read_text()))


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load("compose.yaml")["services"]
    return found


# ---- compose ------------------------------------------------------------------------------------


def test_every_port_is_published_to_this_machine_alone() -> None:
    for name, service in services().items():
        assert service["ports"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_compose_wants_a_key() -> None:
    """Without one, Prometheus and others that use the service's name would get a 403."""
    key = services()["kvserve"]["environment"]["KVSERVE_API_KEY"]
    assert key.startswith("${KVSERVE_API_KEY:?"), "docker compose refuses to start without it"


def test_settings_are_the_servers() -> None:
    environment = services()["kvserve"]["environment"]
    known = set(ServeSettings.__dataclass_fields__)
    ours = {name for name in environment if name.startswith(ENV_PREFIX)}
    assert {name.removeprefix(ENV_PREFIX).lower() for name in ours} <= known and len(ours) == 2


def test_the_server_may_finish_what_it_runs() -> None:
    grace = services()["kvserve"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > ServeSettings().shutdown_timeout + 10


def test_grafana_shows_and_no_more() -> None:
    environment = services()["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert (
        environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    )  # its first admin has a known password
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"


def test_files_that_are_mounted_are_there() -> None:
    for service in services().values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), source
    scrape = load("prometheus.yaml")
    mounts = " ".join(services()["prometheus"]["volumes"])
    assert all(f"/etc/prometheus/{name}" in mounts for name in scrape["rule_files"])
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in services()


# ---- the image ----------------------------------------------------------------------------------


def stages() -> list[str]:
    return re.split(r"(?m)^FROM ", (ROOT / "Dockerfile").read_text())


def test_the_cpu_image_brings_its_kernels() -> None:
    """It has no compiler: attention would be torch's."""
    text = (ROOT / "Dockerfile").read_text()
    (build,) = re.findall(r'RUN if \[ "\$DEVICE" = cpu \]; then \\\n(.*?)fi\n', text, re.DOTALL)[
        -1:
    ]
    assert "g++" in build and "kvserve.kernels.prebuild" in build
    assert "g++" not in stages()[-1]


def test_what_starts_by_default_shows_compression() -> None:
    """kvserve/tiny has traces of a few hundred tokens: too short for Kara's default window."""
    (command,) = re.findall(r"(?m)^CMD (\[.*\])$", (ROOT / "Dockerfile").read_text())
    flags = json.loads(command)
    assert flags[:4] == ["--model", "kvserve/tiny-long", "--policy", "kara"]
    compose = services()["kvserve"]["command"]
    assert compose[1] == "${MODEL:-kvserve/tiny-long}" and compose[3] == "${POLICY:-kara}"
    assert (ROOT / "kvserve" / "data" / "tiny-long" / "config.json").exists()


def test_what_is_copied_is_in_the_context() -> None:
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().split() if line[0] == "!"}
    copied = re.findall(r"(?m)^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text())
    assert {name.partition("/")[0] for line in copied for name in line.split()[:-1]} == kept
    assert all((ROOT / name).exists() for name in kept)


def test_modules_that_the_image_runs_exist() -> None:
    text = (ROOT / "Dockerfile").read_text()
    modules = re.findall(r'-m["\', ]+((?:kvserve|bench)\.[\w.]+)', text)
    assert len(modules) >= 3
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


# ---- Ray ----------------------------------------------------------------------------------------


def test_ray_serves_this_machine_unless_told() -> None:
    assert load("ray/serve.yaml")["http_options"]["host"] == "127.0.0.1"


@pytest.mark.parametrize("name", ["serve.yaml", "kuberay.yaml"])
def test_kvserve_reads_rays_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = load(f"ray/{name}")
    if "spec" in content:
        content = yaml.safe_load(content["spec"]["serveConfigV2"])
    (application,) = content["applications"]
    monkeypatch.setenv("KVSERVE_API_KEY", "one, two")
    config, settings = settings_from(application["args"])
    assert config.parallel.data_parallel_size == 2 and config.compression.policy == "kara"
    assert settings.api_key == ("one", "two"), "the key is in no file"
    monkeypatch.delenv("KVSERVE_API_KEY")
    assert settings_from(application["args"])[1].api_key == ()


def test_kuberay_has_what_a_cluster_needs() -> None:
    cluster = load("ray/kuberay.yaml")["spec"]["rayClusterConfig"]
    lock = (ROOT / "constraints-cpu.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in lock
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for spec in (group["template"]["spec"] for group in groups):
        (container,) = spec["containers"]
        names = {item["name"]: item["valueFrom"]["secretKeyRef"] for item in container["env"]}
        assert names["KVSERVE_API_KEY"] == {"name": "kvserve", "key": "api-key"}
        assert names["HF_TOKEN"]["optional"]
        for probe in ("livenessProbe", "readinessProbe"):
            command = container[probe]["exec"]["command"]
            assert command[:2] == ["python", "-c"] and "wget" not in json.dumps(command)
            compile(command[2], probe, "exec")
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in spec["volumes"]}
        assert "/data/huggingface" in {mount["mountPath"] for mount in container["volumeMounts"]}


def test_rays_dashboard_is_closed_to_strangers() -> None:
    """Who reaches it can run programs; the operator must, so it cannot be on loopback."""
    objects = list(yaml.safe_load_all((DEPLOY / "ray" / "kuberay.yaml").read_text()))
    cluster, policy = objects[0]["spec"]["rayClusterConfig"], objects[1]["spec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for template in (group["template"] for group in groups):
        assert template["metadata"]["labels"] == policy["podSelector"]["matchLabels"]
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        (container,) = template["spec"]["containers"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    to_dashboard = [
        rule["from"]
        for rule in policy["ingress"]
        if any(port["port"] == 8265 for port in rule.get("ports", [{"port": 8265}]))
    ]
    own = [{"podSelector": policy["podSelector"]}]
    (operator,) = [who for who in to_dashboard if who != own]
    assert operator[0]["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "kuberay-operator"
    }


# ---- everything ---------------------------------------------------------------------------------


def test_no_example_opens_a_port_without_a_key() -> None:
    """``-p 8000:8000`` is every interface of the machine."""
    texts = [ROOT / "Dockerfile", ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    commands = [
        line for text in texts for line in text.read_text().splitlines() if "docker run" in line
    ]
    assert commands
    for line in commands:
        assert "-p" not in line.split() or "127.0.0.1:" in line, line
        assert "127.0.0.1:" not in line or "KVSERVE_API_KEY" in line, line


def test_the_version_is_the_charts() -> None:
    chart = load("helm/Chart.yaml")
    assert chart["appVersion"] == kvserve.__version__
