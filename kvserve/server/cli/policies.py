"""``kvserve policies``: prints policies, their costs and their fields."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

_WIDTH = 98


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="only this policy")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from kvserve.engine.policies.registry import describe_policies
    from kvserve.log import ConfigError

    policies = describe_policies()
    if args.name is not None:
        names = ", ".join(policy["name"] for policy in policies)
        policies = [policy for policy in policies if policy["name"] == args.name]
        if not policies:
            raise ConfigError(f"unknown policy {args.name!r}; there are {names}")
    if args.json:
        sys.stdout.write(json.dumps(policies, indent=2) + "\n")
    else:
        sys.stdout.write("\n".join(map(_describe, policies)))
    return 0


def _describe(policy: Mapping[str, Any]) -> str:
    source = f" ({policy['source']})" if policy["source"] else ""
    lines = _wrapped(f"{policy['name']}: {policy['summary']}{source}", 0)
    lines += _wrapped(policy["details"], 2)
    for title, text in facts(policy):
        lines += _wrapped(f"{title}: {text}", 2)
    for field in policy["args"]:
        flag = f"--policy.{field['name']}"
        about = f"default {value(field['default'])}; {values(field)}"
        lines += _wrapped(f"{flag:24} {about}", 2, 27) + _wrapped(field["help"], 27)
    return "\n".join(lines) + "\n"


def _wrapped(text: str, first: int, indent: int | None = None) -> list[str]:
    later = first if indent is None else indent
    return textwrap.wrap(text, _WIDTH, initial_indent=" " * first, subsequent_indent=" " * later)


def facts(policy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a policy costs and what it is not for, each under its title."""
    titles = {"cost": "Cost", "avoid": "Not for"}
    return [(title, policy[key]) for key, title in titles.items() if policy[key]]


def value(value: Any) -> str:
    """A default as it is typed."""
    return "none" if value is None else json.dumps(value).strip('"')


def values(field: Mapping[str, Any]) -> str:
    """What a field may be: its listed values, or its type and range."""
    listed = field["type"] == "string" and field["range"]
    return field["range"] if listed else "; ".join(filter(None, [field["type"], field["range"]]))
