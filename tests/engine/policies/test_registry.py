"""What every policy has to bring with it; the rest is derived."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.registry import policy_class, policy_names
from tests.thinning import slow
from tests.waiting import WAIT

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", policy_names())
def test_a_name_leads_to_its_policy(name: str) -> None:
    policy = policy_class(name)
    assert issubclass(policy, Policy) and policy.name == name
    assert policy.__module__ == f"kvserve.engine.policies.{name}"


@pytest.mark.parametrize("name", [name for name in policy_names() if name != "none"])
def test_a_policy_has_a_worked_example(name: str) -> None:
    """A test in here imports its class: numbers by hand, or a naive loop over heads."""
    policy = policy_class(name)
    line = re.compile(rf"^from {policy.__module__} import .*\b{policy.__name__}\b", re.MULTILINE)
    tests = [file for file in HERE.rglob("*.py") if file.name != "cases.py"]
    assert any(line.search(file.read_text()) for file in tests)


@pytest.mark.parametrize("module", ["adakv", *slow("chunkkv", "base", "registry")])
def test_a_module_can_be_the_first_one_imported(module: str) -> None:
    command = [sys.executable, "-c", f"import kvserve.engine.policies.{module}"]
    subprocess.run(command, check=True, timeout=WAIT)
