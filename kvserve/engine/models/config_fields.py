"""A config.json, read field by field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvserve.log import ConfigError


@dataclass(frozen=True)
class Fields:
    """A config.json read field by field; null counts as absent."""

    raw: Mapping[str, Any]
    where: str

    def error(self, problem: str) -> ConfigError:
        return ConfigError(f"--model: {self.where} {problem}")

    def absent(self, name: str, why: str = "") -> ConfigError:
        return self.error(
            f"has no field {name!r}{why}; fetch it again, or set it by --hf-overrides"
        )

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.absent(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"sets {name} to {value!r}, which is no positive integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float):
            raise self.error(f"sets {name} to {value!r}, which is no number")
        return float(value)

    def part(self, name: str) -> dict[str, Any]:
        """A JSON object in the object, empty where it is absent."""
        value = self.raw.get(name) or {}
        if not isinstance(value, dict):
            raise self.error(f"sets {name} to {value!r}, which is no JSON object")
        return dict(value)
