"""Names to policies: the built-in ones and those of the entry-point group ``kvserve.policies``.

Both are found alike, by a name and ``module:class``, and loaded when they are asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvserve.engine.policies.base import Policy, PolicyError, field_names
from kvserve.engine.policies.parts.arguments import check_counts

_GROUP = "kvserve.policies"
_BUILT_IN = {
    "none": "none:NoCompression",
    "kara": "kara:Kara",
    "streaming_llm": "streaming_llm:StreamingLLM",
    "h2o": "h2o:H2O",
    "snapkv": "snapkv:SnapKV",
    "rkv": "rkv:RKV",
    "keydiff": "keydiff:KeyDiff",
    "triattention": "triattention:TriAttention",
    "chunkkv": "chunkkv:ChunkKV",
    "pyramidkv": "pyramidkv:PyramidKV",
    "pyramidinfer": "pyramidinfer:PyramidInfer",
    "dynamickv": "dynamickv:DynamicKV",
    "windowkv": "windowkv:WindowKV",
    "adakv": "adakv:AdaKV",
    "spindlekv": "spindlekv:SpindleKV",
}


@cache
def _entries() -> dict[str, EntryPoint]:
    """Where the policies are, by name. A built-in name cannot be taken by a plug-in."""
    package = __name__.rpartition(".")[0]
    found = {
        name: EntryPoint(name, f"{package}.{place}", _GROUP) for name, place in _BUILT_IN.items()
    }
    for entry in entry_points(group=_GROUP):
        found.setdefault(entry.name, entry)
    return found


def policy_names() -> list[str]:
    return list(_entries())


def policy_class(name: object) -> type[Any]:
    """The class behind a name; raises ``PolicyError`` listing the names there are."""
    known = _entries()
    if not isinstance(name, str) or name not in known:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(known)}", "name")
    policy: type[Any] = known[name].load()
    return policy


def make_policy(spec: str | Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> Policy:
    """A policy from its name or ``{"name": ..., **fields}``, with other ``defaults`` if so.

    Raises ``PolicyError`` naming the argument that is unknown, out of range, or without effect.
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
    # A preset's fields stand under the given ones; a given ratio stands for its budget.
    chosen = given.get("preset")
    preset = dict(policy.presets.get(chosen, defaults)) if isinstance(chosen, str) else {**defaults}
    if given.get("ratio") is not None:
        preset.pop("budget", None)
    try:
        made: Policy = policy(**{**preset, **given})
        check_counts(made, given, preset)
    except PolicyError as error:
        raise PolicyError(f"policy {name}: {error}", error.argument) from None
    return made


def describe_policies() -> list[dict[str, Any]]:
    """The descriptions of all policies, their arguments and JSON Schemas."""
    from kvserve.engine.policies.parts.schema import describe

    return [describe(name, policy_class(name)) for name in policy_names()]
