"""Names to policies: the built-in ones and those of the entry-point group ``kvserve.policies``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from kvserve.engine.policies.adakv import AdaKV
from kvserve.engine.policies.base import Policy, PolicyError, field_names
from kvserve.engine.policies.chunkkv import ChunkKV
from kvserve.engine.policies.dynamickv import DynamicKV
from kvserve.engine.policies.h2o import H2O
from kvserve.engine.policies.kara import Kara
from kvserve.engine.policies.keydiff import KeyDiff
from kvserve.engine.policies.none import NoCompression
from kvserve.engine.policies.pyramidinfer import PyramidInfer
from kvserve.engine.policies.pyramidkv import PyramidKV
from kvserve.engine.policies.rkv import RKV
from kvserve.engine.policies.schema import describe
from kvserve.engine.policies.snapkv import SnapKV
from kvserve.engine.policies.spindlekv import SpindleKV
from kvserve.engine.policies.streaming_llm import StreamingLLM
from kvserve.engine.policies.windowkv import WindowKV

_BUILT_IN = (
    NoCompression,
    Kara,
    StreamingLLM,
    H2O,
    SnapKV,
    RKV,
    KeyDiff,
    ChunkKV,
    PyramidKV,
    PyramidInfer,
    DynamicKV,
    WindowKV,
    AdaKV,
    SpindleKV,
)


@cache
def _policies() -> dict[str, type[Any]]:
    """Policy classes by name. A plug-in is an entry point that loads such a class."""
    found: dict[str, type[Any]] = {policy.name: policy for policy in _BUILT_IN}
    for entry in entry_points(group="kvserve.policies"):
        found.setdefault(entry.name, entry.load())
    return found


def policy_names() -> list[str]:
    return list(_policies())


def policy_class(name: object) -> type[Any]:
    """The class behind a name; raises ``PolicyError`` listing the names there are."""
    known = _policies()
    if name not in known:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(known)}", "name")
    return known[str(name)]


def make_policy(spec: str | Mapping[str, Any]) -> Policy:
    """A policy from its name or ``{"name": ..., **fields}``.

    Raises ``PolicyError`` naming the argument that is unknown or out of range.
    """
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("name", None)
    policy = policy_class(name)
    allowed = field_names(policy)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(allowed) or 'none'}"
            raise PolicyError(f"policy {name} has no argument {key!r}; {hint}", str(key))
    given = _with_preset(policy, given)
    try:
        made: Policy = policy(**{allowed[key]: value for key, value in given.items()})
    except PolicyError as error:
        raise PolicyError(f"policy {name}: {error}", error.argument) from None
    return made


def _with_preset(policy: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The preset's fields under the given ones; a given ratio stands for its budget."""
    name = given.get("preset")
    preset = dict(policy.presets.get(name, {})) if isinstance(name, str) else {}
    if given.get("ratio") is not None:
        preset.pop("budget", None)
    return {**preset, **given}


def describe_policies() -> list[dict[str, Any]]:
    """What is to be said of every policy, its arguments and their JSON Schema."""
    return [describe(name, policy) for name, policy in _policies().items()]
