"""Policies as written on the command line, and their labels in tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvserve.config import KV_CACHE_DTYPES
from kvserve.engine.policies.base import field_names
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.flags import read_any, read_object
from kvserve.scheduler.triggers.trigger import Never, Trigger
from kvserve.scheduler.triggers.whole_row import AtPrefillEnd


@dataclass(frozen=True)
class PolicySpec:
    """A policy as the user wrote it: its name, the fields that were set, and what its cache is held
    in if that was said."""

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    kv_cache_dtype: str | None = None

    @property
    def label(self) -> str:
        """As the command line reads it."""
        texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in self.fields.items()}
        settings = ",".join(f"{name}={text}" for name, text in texts.items())
        label = f"{self.name}:{settings}" if settings else self.name
        return label if self.kv_cache_dtype is None else f"{label}@{self.kv_cache_dtype}"

    @property
    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, **self.fields}

    def with_fields(self, **more: Any) -> PolicySpec:
        """The same policy with further fields; ``PolicyError`` if it refuses them."""
        spec = replace(self, fields={**self.fields, **more})
        make_policy(spec.as_dict)
        return spec

    @property
    def incomplete(self) -> bool:
        """Whether the policy still lacks a required field, such as a budget."""
        needs = policy_class(self.name).needs
        return bool(needs) and not any(name in self.fields for name in needs)

    def has_field(self, name: str) -> bool:
        """Whether the policy knows this field, set or not."""
        return name in field_names(policy_class(self.name))

    @property
    def trigger(self) -> Trigger:
        """When the policy has events, on a model of some size."""
        return make_policy(self.as_dict).for_model(num_layers=8, block_size=16).event_trigger


def every_policy() -> list[PolicySpec]:
    """All policies that have events while decoding, in the form that has them, without budgets."""
    found = []
    for spec in map(PolicySpec, policy_names()):
        if spec.has_field("trigger"):
            spec.fields["trigger"] = "threshold"
        elif spec.name == "streaming_llm":
            spec.fields["period"] = 32  # with 1, its paper's, every step is an event
        given = spec.with_fields(budget=512) if spec.incomplete else spec
        if not isinstance(given.trigger, Never | AtPrefillEnd):
            found.append(spec)
    return found


NO_COMPRESSION = PolicySpec("none")
DEFAULT_POLICIES = (NO_COMPRESSION, PolicySpec("kara", {"window": 128, "buffer": 16}))


def policy_spec(text: str) -> PolicySpec:
    """``kara``, ``kara:window=128,ratio=0.3@k8v4`` or ``{"name": "kara", "window": 128}``."""
    try:
        spec = _from_json(text) if text.startswith("{") else _from_words(text)
        return spec if spec.incomplete else spec.with_fields()
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _from_json(text: str) -> PolicySpec:
    fields = read_object(text)
    if "name" not in fields:
        raise ValueError(f'{text!r} names no policy, as in {{"name": "kara", "window": 128}}')
    return PolicySpec(fields.pop("name"), fields)


def each_as_held(specs: Iterable[PolicySpec], usual: Sequence[str]) -> list[tuple[PolicySpec, str]]:
    """Each policy with what its cache is held in: what it says itself, else each of ``usual``;
    nothing twice."""
    found = {}
    for spec in specs:
        bare = replace(spec, kv_cache_dtype=None)
        for dtype in [spec.kv_cache_dtype] if spec.kv_cache_dtype else usual:
            found[bare.label, dtype] = bare, dtype
    return list(found.values())


def _from_words(text: str) -> PolicySpec:
    text, at, dtype = text.partition("@")
    if at and dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"{dtype!r} after @ is none of {', '.join(KV_CACHE_DTYPES)}")
    name, _, settings = text.partition(":")
    fields = {}
    for setting in filter(None, settings.split(",")):
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"{setting!r} is not FIELD=VALUE, as in kara:window=128,ratio=0.3")
        fields[key.strip()] = read_any(value.strip())
    return PolicySpec(name.strip(), fields, dtype or None)
