"""``kvserve policies``: prints policies, their costs and their fields; writes docs/policies.md."""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH = 98
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

[Choices](choices.md) says what was chosen where a paper leaves something open.

`make docs` writes this page from the policies themselves: edit those.
"""
_LENGTHS = {"model": "equal", "layer": "by layer", "head": "by KV head"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="only this policy")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--markdown", action="store_true", help="print docs/policies.md")
    form.add_argument("--compatibility", action="store_true", help="print docs/compatibility.md")


def run(args: argparse.Namespace) -> int:
    from kvserve.engine.policies.registry import describe_policies
    from kvserve.log import ConfigError

    if args.compatibility:
        from kvserve.server.cli.compatibility import markdown as compatibility

        sys.stdout.write(compatibility())
        return 0
    policies = describe_policies()
    if args.name is not None:
        names = ", ".join(policy["name"] for policy in policies)
        policies = [policy for policy in policies if policy["name"] == args.name]
        if not policies:
            raise ConfigError(f"unknown policy {args.name!r}; there are {names}")
    if args.json:
        sys.stdout.write(json.dumps(policies, indent=2) + "\n")
    elif args.markdown:
        sys.stdout.write(markdown(policies))
    else:
        sys.stdout.write("\n".join(map(_describe, policies)))
    return 0


# ---- the terminal -----------------------------------------------------------------------------


def _describe(policy: Mapping[str, Any]) -> str:
    source = f" ({policy['source']})" if policy["source"] else ""
    lines = _wrapped(f"{policy['name']}: {policy['summary']}{source}", 0)
    lines += _wrapped(policy["details"], 2)
    for title, text in _facts(policy):
        lines += _wrapped(f"{title}: {text}", 2)
    for field in policy["args"]:
        flag = f"--policy.{field['name']}"
        about = f"default {_value(field['default'])}; {_values(field)}"
        lines += _wrapped(f"{flag:24} {about}", 2, 27) + _wrapped(field["help"], 27)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, first: int, indent: int | None = None) -> list[str]:
    later = first if indent is None else indent
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * later)


def _facts(policy: Mapping[str, Any]) -> list[tuple[str, str]]:
    titles = {"cost": "Cost", "avoid": "Not for"}
    return [(title, policy[key]) for key, title in titles.items() if policy[key]]


def _value(value: Any) -> str:
    return "none" if value is None else json.dumps(value).strip('"')


def _values(field: Mapping[str, Any]) -> str:
    """What a field may be: its listed values, or its type and range."""
    listed = field["type"] == "string" and field["range"]
    return field["range"] if listed else "; ".join(filter(None, [field["type"], field["range"]]))


# ---- docs/policies.md -------------------------------------------------------------------------


def markdown(policies: Sequence[Mapping[str, Any]]) -> str:
    """All policies as one page: an overview, then each with its fields."""
    overview = [
        [f"[{p['name']}](#{p['name']})", p["summary"], _LENGTHS[p["granularity"]], p["avoid"]]
        for p in policies
    ]
    parts = [_INTRO, _table(["policy", "what it does", "lengths", "not for"], overview)]
    return "\n".join([*parts, *map(_section, policies)])


def _section(policy: Mapping[str, Any]) -> str:
    parts = [f"## {policy['name']}\n", f"{policy['summary']} {policy['details']}".rstrip() + "\n"]
    if policy["source"]:
        link = r"[arXiv \1](https://arxiv.org/abs/\1)"
        parts.append(re.sub(r"arXiv (\d+\.\d+)", link, policy["source"]) + ".\n")
    parts += [f"**{title}.** {text}\n" for title, text in _facts(policy)]
    if policy["args"]:
        rows = [
            [
                f"`{field['name']}`",
                f"`{_value(field['default'])}`",
                _values(field),
                field["help"],
            ]
            for field in policy["args"]
        ]
        parts.append(_table(["field", "default", "values", "meaning"], rows))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
