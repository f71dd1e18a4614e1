"""``kvserve policies``: every policy, where it comes from, and its fields."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any


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
        sys.stdout.write(json.dumps(policies, indent=2, default=str) + "\n")
    else:
        sys.stdout.write("\n".join(map(_describe, policies)))
    return 0


def _describe(policy: Mapping[str, Any]) -> str:
    source = f" ({policy['source']})" if policy["source"] else ""
    lines = [f"{policy['name']}: {policy['summary']}{source}"]
    for field in policy["args"]:
        flag = f"--policy.{field['name']}"
        lines.append(f"  {flag:28} {field['type']}, default {field['default']}")
        if field["help"]:
            lines.append(f"  {'':28} {field['help']}")
    return "\n".join(lines) + "\n"
