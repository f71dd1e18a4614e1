"""Whether a policy fits a model and a layout: decided of configs alone, for the server's policy and
for those of requests."""

from __future__ import annotations

from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.policies.base import Policy
from kvserve.entry_format import EntryFormat
from kvserve.log import ConfigError
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.trigger import EventKind

NO_TURNS = "no later turn goes on from an earlier one without --continuations on"


def check_policy(
    policy: Policy, spec: ModelSpec, form: EntryFormat, max_len: int, *, continues: bool
) -> None:
    """``ConfigError`` if the model cannot be served under the policy, with entries of this form."""
    if (reason := policy_refusal(policy, spec, form, "--policy none")) is not None:
        raise ConfigError(f"--policy: {reason}")
    window = policy.event_trigger.num_queries
    if window > max_len:
        raise ConfigError(f"--policy.window: {window} exceeds the context of {max_len} tokens")
    if policy.demands.protect_turns and not continues:
        raise ConfigError(f"--policy.protect_turns: {NO_TURNS}")


def policy_refusal(policy: Policy, spec: ModelSpec, form: EntryFormat, none: str) -> str | None:
    """Why the model may not be served under this policy, if so, and what to use: ``none``, unless
    another argument will do."""
    if policy.name == "none":
        return None
    name, wants, why = policy.name, policy.demands, spec.policy_refusal
    prunes = wants.event_kind is EventKind.PRUNED
    mixed = (spec.windowed or spec.states) and spec.layers.full
    if prunes and form.few:
        why = f"{name} may drop a row's first entry, which {form.name} keeps and k8v4 does not"
    elif spec.borrowed and prunes:
        why = f"{name} prunes between layers, and these are transformers' own"
    elif spec.soft_cap and (wants.query_reduction or wants.recomputed_reduction):
        why = f"the model caps its logits, and {name} scores by logits that are not"
    elif mixed and prunes:
        why = f"{name} drops tokens between layers; some have windows or states"
    elif mixed and wants.event_kind is EventKind.CODED:
        why = f"{name} is not built for layers with sliding windows or states"
    elif mixed and wants.recomputed_reduction is not None:
        return "query_source recompute wants what windows and states have given back; use log"
    return why and f"{why}; use {none}"


def continuation_refusal(policy: Policy, spec: ModelSpec) -> str | None:
    """Why sequences under ``policy`` cannot be continued on this model; ``None`` if they can."""
    name, wants = policy.name, policy.demands
    if spec.rope.kind == "dynamic":
        return "this model's keys depend on the prompt's length (dynamic NTK)"
    if wants.kept_scores:
        return f"policy {name} keeps scores beside its blocks"
    if wants.event_kind is EventKind.CODED:
        return f"policy {name} holds entries as codes"
    if wants.rest_bits:
        return f"policy {name} leaves a rest, which does not move to another row"
    if wants.granularity is not Granularity.MODEL and not wants.cuts_again:
        return f"policy {name} cannot cut a second prompt"
    return None


def choose_granularity(policy: Policy, kv_layout: str, ranks: int) -> Granularity:
    """The layout that ``--kv-layout`` names, or (auto) the one that the policy needs.

    ``ConfigError`` if the policy or the number of ranks does not allow it.
    """
    needed = policy.demands.granularity
    layout = needed if kv_layout == "auto" else Granularity(kv_layout)
    if not needed.fits(layout):
        raise ConfigError(
            f"--kv-layout {layout.value}: policy {policy.name} needs lengths that differ by "
            f"{needed.value}; choose --kv-layout {needed.value} or auto"
        )
    if layout is Granularity.HEAD and ranks > 1:
        raise ConfigError(
            "--tensor-parallel-size: with --kv-layout head (adakv, spindlekv) each rank would need "
            "another number of blocks, and there is one pool; use 1, or another policy"
        )
    return layout
