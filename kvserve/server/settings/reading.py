"""Builds the engine's and the server's settings from flags, the environment and a file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvserve.config import SECTIONS, EngineConfig, ModelConfig
from kvserve.log import ConfigError
from kvserve.server.settings.args import ENV_PREFIX, Flag, UsageError, flags_of, read_names, resolve
from kvserve.server.settings.serve_settings import ServeSettings


def engine_flags() -> dict[str, list[Flag]]:
    """Flags by section, in the order of ``EngineConfig``."""
    return {**{name: flags_of(kind) for name, kind in SECTIONS.items()}, "": flags_of(EngineConfig)}


def read_settings(args: argparse.Namespace) -> tuple[EngineConfig, ServeSettings]:
    """All settings from flags, environment and file. A ``UsageError`` names what is wrong."""
    given = vars(args).copy()
    model = given.pop("model_tag")
    if model is not None and given.setdefault("model", model) != model:
        raise UsageError(f"the model is given twice: {model!r} and --model {given['model']!r}")
    values = resolve(_flags(), given)
    try:
        return _build(values)
    except ConfigError as exc:
        raise UsageError(str(exc)) from None


def settings_from(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    """All settings from names and values as in a file. A ``ConfigError`` names what is wrong.

    Keys may come from the environment too (``KVSERVE_API_KEY``): a file is no place for them.
    """
    given = read_names(_flags(), values, "settings")
    keys = os.environ.get(f"{ENV_PREFIX}API_KEY")
    if keys is not None:
        given.setdefault("api_key", [key.strip() for key in keys.split(",")])
    return _build(given)


def _flags() -> list[Flag]:
    engine = (flag for flags in engine_flags().values() for flag in flags)
    return [*flags_of(ServeSettings), *engine]


def _build(values: Mapping[str, Any]) -> tuple[EngineConfig, ServeSettings]:
    reason = ""
    if values.get("policy") == "auto":
        from kvserve.benchmarks.commands.frontier import automatic

        setting, reason = automatic(values.get("model", ModelConfig().model), values)
        values = {**values, **setting}
    server = {flag.name for flag in flags_of(ServeSettings)}
    config = EngineConfig.from_flat(**{k: _plain(v) for k, v in values.items() if k not in server})
    compression = replace(config.compression, policy_reason=reason)
    return (
        replace(config, compression=compression),
        ServeSettings(**{k: _plain(v) for k, v in values.items() if k in server}),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
