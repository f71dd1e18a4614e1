"""The engine's and the server's settings: flag > environment > file > default."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvserve import absent
from kvserve.config import SECTIONS, SETTINGS, CompressionConfig, EngineConfig, ModelConfig
from kvserve.fields import Setting, settings_of
from kvserve.flags import read_any, read_plain
from kvserve.log import ConfigError
from kvserve.server.settings.args import UsageError, add_fields
from kvserve.server.settings.serve_settings import ServeSettings

ENV_PREFIX = "KVSERVE_"
_OTHERS = ("CONFIG", "COMMIT", "PEERS")
"""Variables that are no settings: the file's, and those that `bench` reads."""
_LINKS = re.compile(r"SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP)")
"""What Kubernetes sets for services that are called kvserve, beside KVSERVE_PORT=tcp://..."""
_OF_SERVER = {item.name: item for item in settings_of(ServeSettings)}
_ALL: Mapping[str, Setting] = {**_OF_SERVER, **SETTINGS}
GROUPS = {
    **{"server": settings_of(ServeSettings)},
    **{name: settings_of(kind) for name, kind in SECTIONS.items()},
    **{"execution": settings_of(EngineConfig)},
}
"""All settings by the title under which ``--help`` lists them."""


def read_settings(args: argparse.Namespace) -> tuple[EngineConfig, ServeSettings]:
    """All settings from flags, environment and file. A ``UsageError`` names what is wrong."""
    given = vars(args).copy()
    model = given.pop("model_tag")
    if model is not None and given.setdefault("model", model) != model:
        raise UsageError(f"the model is given twice: {model!r} and --model {given['model']!r}")
    path = given.pop("config", os.environ.get(ENV_PREFIX + "CONFIG"))
    layers = [_from_file(Path(path)) if path else {}, _from_environment(), given]
    values: dict[str, Any] = {}
    for layer in layers:
        # A layer that names another policy drops the arguments of the one before.
        if layer.get("policy", values.get("policy")) != values.get("policy"):
            values.pop("policy_args", None)
        policy_args = {**values.get("policy_args", {}), **layer.get("policy_args", {})}
        values |= layer
        if policy_args:
            values["policy_args"] = policy_args
    try:
        return _build(values)
    except ConfigError as exc:
        raise UsageError(str(exc)) from None


def settings_from(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    """All settings from names and values as in a file. A ``ConfigError`` names what is wrong.

    Keys may come from the environment too (``KVSERVE_API_KEY``): a file is no place for them.
    """
    given = _read_names(values, "settings")
    keys = os.environ.get(f"{ENV_PREFIX}API_KEY")
    if keys is not None:
        given.setdefault("api_key", [key.strip() for key in keys.split(",")])
    return _build(given)


def check_policies(config: CompressionConfig) -> None:
    """Raises ``ConfigError`` if ``--policy`` cannot be made, or a name in ``--request-policies`` is
    not a policy: before an engine starts, which takes seconds."""
    if config == CompressionConfig():
        return  # torch need not be loaded for it
    from kvserve.engine.policies.base import PolicyError
    from kvserve.engine.policies.registry import make_policy, policy_names

    try:
        make_policy({"name": config.policy, **config.policy_args})
    except PolicyError as error:
        raise ConfigError(f"{error.flag}: {error}") from None
    if unknown := sorted(set(config.request_policies) - set(policy_names())):
        names = ", ".join(policy_names())
        raise ConfigError(f"--request-policies: unknown policy {unknown[0]!r}; there are {names}")


def _build(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    reason = ""
    if values.get("policy") == "auto":
        from kvserve.measured import automatic

        setting, reason = automatic(values.get("model", ModelConfig().model), values)
        values = {**values, **setting}
    of_engine = {name: value for name, value in values.items() if name in SETTINGS}
    of_server = {
        name: _OF_SERVER[name].checked(value)
        for name, value in values.items()
        if name in _OF_SERVER
    }
    config = EngineConfig.from_flat(**of_engine)
    compression = replace(config.compression, policy_reason=reason)
    return replace(config, compression=compression), ServeSettings(**of_server)


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX)
        if name == variable or name in _OTHERS or _LINKS.search(name) or text.startswith("tcp://"):
            continue
        key = name.lower()
        if key not in _ALL and key.startswith("policy_"):
            key = key.replace("_", ".", 1)
        _read(values, key, text, variable)
    return values


def _from_file(path: Path) -> dict[str, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that a mapping has twice: of two values one would be ignored."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            node, seen = super().compose_mapping_node(anchor), set[str]()
            for key, _ in node.value:
                if str(key.value) in seen:
                    where = f"{path}: line {key.start_mark.line + 1}"
                    raise UsageError(f"--config: {where}: {key.value} is given twice")
                seen.add(str(key.value))
            return node

    try:
        content = yaml.load(path.read_text(), Loader) or {}
    except OSError as exc:
        raise UsageError(f"--config: cannot read {path}: {exc.strerror}") from None
    except yaml.YAMLError as exc:
        raise UsageError(f"--config: {path} is not YAML: {' '.join(str(exc).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"--config: {path} must hold settings, as in 'port: 8000'")
    return _read_names(content, f"--config: {path}")


def _read_names(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Values by name, with - or _, as YAML gives them. A ``UsageError`` begins with ``where``."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        _read(values, str(key).replace("-", "_"), value, where, str(key))
    return values


def _read(values: dict[str, Any], name: str, value: Any, where: str, key: str = "") -> None:
    """Add a setting to ``values``: a plain value, or text. ``policy.FIELD`` is one of the policy.

    A ``UsageError`` begins with ``where``, and names the ``key`` of a file.
    """

    def wrong(message: str, _: str = "") -> UsageError:
        return UsageError(f"{where}: {message}")

    place, of_policy = f"{where}: {key}" if key else where, values.setdefault("policy_args", {})
    if name == "policy" and isinstance(value, dict):
        add_fields(of_policy, {k: v for k, v in value.items() if k != "name"}, place)
        value = value.get("name", "none")
    if name.startswith("policy."):
        field = read_any(value) if isinstance(value, str) else value
        return add_fields(of_policy, {name.removeprefix("policy."): field}, where)
    if not absent.take_known({name: value}, _ALL, absent.SETTINGS, wrong):
        return None
    try:
        read = read_plain(_ALL[name], value)
    except argparse.ArgumentTypeError as exc:
        raise UsageError(f"{place}: {exc}") from None
    if name == "policy_args":
        return add_fields(of_policy, read, place)
    if name in values:
        raise wrong(f"{name} is given twice, with - and with _")
    values[name] = read
    return None
