"""``policies.md``: an overview of all policies, then each with its fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kvserve.engine.policies as engine_policies
from docs.generate.markdown import table
from kvserve.engine.policies.registry import describe_policies
from kvserve.server.cli.policies import facts, value, values

_INTRO = """\
# Policies

A policy decides which entries of the KV cache stay. [Choose a policy](choose-a-policy.md) says
which one to take, and when none; this page has all of them with their fields. `--policy NAME
--policy.FIELD VALUE` sets the server's policy; a request's `kv_policy` (a name, or `{"name": ...,
fields}`) may override it. `kvserve policies` prints the same in a terminal, `GET /v1/kv/policies`
gives the fields as JSON Schema, and `kvserve inspect` shows which entries a policy keeps of a
given text.

An integer that counts tokens or entries is at most the server's context (`--max-model-len`).
*Lengths*: whether all layers and KV heads hold equally many entries (`--kv-layout`).
"""
_LENGTHS = {"model": "equal", "layer": "by layer", "head": "by KV head"}


def page() -> str:
    described = describe_policies()
    overview = [
        [f"[{p['name']}](#{p['name']})", p["summary"], _LENGTHS[p["granularity"]], p["avoid"]]
        for p in described
    ]
    parts = [_INTRO, table(["policy", "what it does", "lengths", "not for"], overview)]
    choices = (Path(engine_policies.__file__).parent / "CHOICES.md").read_text()
    return "\n".join([*parts, *map(_section, described), choices])


def _section(policy: Mapping[str, Any]) -> str:
    parts = [f"## {policy['name']}\n", f"{policy['summary']} {policy['details']}".rstrip() + "\n"]
    if policy["source"]:
        link = r"[arXiv \1](https://arxiv.org/abs/\1)"
        parts.append(re.sub(r"arXiv (\d+\.\d+)", link, policy["source"]) + ".\n")
    parts += [f"**{title}.** {text}\n" for title, text in facts(policy)]
    if policy["args"]:
        rows = [
            [f"`{arg['name']}`", f"`{value(arg['default'])}`", values(arg), arg["help"]]
            for arg in policy["args"]
        ]
        parts.append(table(["field", "default", "values", "meaning"], rows))
    return "\n".join(parts)
