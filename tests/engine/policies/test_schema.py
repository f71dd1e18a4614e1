"""What is said of the policies' fields is what they check."""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import describe_policies, make_policy, policy_class

DESCRIBED = {policy["name"]: policy for policy in describe_policies()}
WRONG: dict[str, list[Any]] = {
    "integer": [1.5, 64.0, "many", True],
    "number": ["many", True, float("nan")],
    "string": [3, ["sum"]],
    "boolean": ["perhaps", 2],
}


def needs(name: str) -> list[str]:
    """Fields of which one has to be given."""
    return [
        field
        for option in DESCRIBED[name]["schema"].get("anyOf", [])
        for field in option["required"]
    ]


def minimal(name: str) -> dict[str, Any]:
    """A policy with nothing but what it needs."""
    return {"name": name, **dict.fromkeys(needs(name)[:1], 100)}


def refused(name: str, field: str, value: Any) -> bool:
    """Whether a value is refused, by the field's name."""
    given = {"name": name} if field in needs(name) else minimal(name)
    try:
        make_policy({**given, field: value})
    except PolicyError as error:
        assert error.argument == field, f"{field}={value!r}: {error}"
        return True
    return False


def docstring(name: str) -> str:
    module = inspect.getmodule(policy_class(name))
    return " ".join((module.__doc__ or "").split()) if module else ""


@pytest.mark.parametrize("name", DESCRIBED)
def test_everything_is_said(name: str) -> None:
    policy = DESCRIBED[name]
    assert policy["summary"].endswith(".") and policy["cost"] and policy["avoid"]
    paper = re.search(r"\(arXiv \d{4}\.\d{5}\)$", policy["source"])
    assert paper or name == "none" or "idea of our own" in docstring(name)
    assert all(argument["help"] for argument in policy["args"])
    assert policy["schema"]["additionalProperties"] is False
    json.dumps(policy)
    make_policy(minimal(name))


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_schema_tells_the_truth(name: str) -> None:
    for field, facts in DESCRIBED[name]["schema"]["properties"].items():
        if field != "name":
            check_property(name, field, facts)


def check_property(name: str, field: str, facts: dict[str, Any]) -> None:
    assert facts["description"], field
    types = facts["type"] if isinstance(facts["type"], list) else [facts["type"]]
    if facts["default"] is not None:
        assert not refused(name, field, facts["default"]), field
    for value in facts.get("enum", []):
        assert field == "trigger" or not refused(name, field, value), (field, value)
    if "enum" in facts:
        assert refused(name, field, "no such choice"), field
    for value in WRONG[types[0]]:
        if not isinstance(value, str) or "string" not in types:
            assert refused(name, field, value), (field, value)
    for bound, beyond in (("minimum", -1), ("maximum", 1)):
        if bound in facts:
            assert refused(name, field, facts[bound] + beyond), (field, bound)


@pytest.mark.parametrize("name", [name for name in DESCRIBED if needs(name)])
def test_what_is_needed_is_needed(name: str) -> None:
    with pytest.raises(PolicyError, match="budget"):
        make_policy(name)
