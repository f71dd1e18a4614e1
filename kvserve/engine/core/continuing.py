"""Which policies may save a sequence's cache for the next turn of its conversation."""

from __future__ import annotations

from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.spindlekv import writes_codes
from kvserve.scheduler.layout import Granularity


def continuation_refusal(policy: Policy, spec: ModelSpec) -> str | None:
    """Why sequences under ``policy`` cannot be continued on this model; ``None`` if they can."""
    name = policy.name
    if spec.rope.kind == "dynamic":
        return "this model's keys depend on the prompt's length (dynamic NTK)"
    if policy.kept_scores:
        return f"policy {name} keeps scores beside its blocks"
    if writes_codes(policy):
        return f"policy {name} holds entries as codes"
    if policy.granularity is not Granularity.MODEL and not policy.cuts_again:
        return f"policy {name} cannot cut a second prompt"
    if not hasattr(policy.event_trigger, "next_turn"):
        return f"policy {name} does not say what a second prompt means to it"
    return None
