"""Check the policies that requests choose, and give each the id that scheduler and runner use."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import count
from typing import Any

from kvserve.engine.core.build import BuiltEngine
from kvserve.engine.messages import PolicyOffer
from kvserve.engine.policies.base import Policy, PolicyError
from kvserve.engine.policies.parts.arguments import field_names
from kvserve.engine.policies.registry import make_policy, policy_class, policy_names
from kvserve.engine.runner.policy_fit import NO_TURNS, policy_refusal
from kvserve.log import ConfigError, RequestError
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.triggers.trigger import EventKind

REMEMBERED = 32
_LEAST, _MOST = 64, 512
"""Bounds of an offered window or budget, in tokens."""


class RequestPolicies:
    """The server's policy, and the policies of requests that can run beside it."""

    def __init__(self, built: BuiltEngine) -> None:
        config = built.plan.config
        self._allowed = config.compression.allow_request_policy
        self._own = {"name": config.compression.policy, **config.compression.policy_args}
        self._has_turns = config.cache.continuations == "on"
        self._built, self._plan = built, built.plan
        self._ids: dict[Policy, int] = {self._plan.policy: 0}

    def resolve(self, spec: Any) -> Policy:
        """A request's policy; ``RequestError`` says why it cannot run on this server."""
        if spec is None or spec == self._own:
            return self._plan.policy
        layout = self._built.scheduler.layout
        policy = read_policy(spec, self._plan.max_len)
        try:
            policy = policy.for_model(layout.num_layers, layout.block_size)
            policy = self._with_servers_statistics(policy)
        except PolicyError as error:
            raise RequestError(str(error), param=f"kv_policy.{error.argument}") from None
        if (refusal := self._refusal(policy)) is not None:
            field, why = refusal
            raise RequestError(why, param="kv_policy" + field)
        return policy

    def _refusal(self, policy: Policy) -> tuple[str, str] | None:
        """Which field keeps a policy from running on this server (empty: the policy), and why."""
        plan, name, layout = self._plan, policy.name, self._built.scheduler.layout
        wants = policy.demands
        if self._allowed == "none" and name != "none" and policy != self._plan.policy:
            why = "this server does not let requests choose a policy (--allow-request-policy none)"
            return "", why
        if (reason := policy_refusal(policy, plan.spec, plan.form, "none")) is not None:
            return "", reason
        if not wants.granularity.fits(layout.granularity):
            return "", (
                f"policy {name} needs lengths that differ by {wants.granularity.value}; start the "
                f"server with --kv-layout {wants.granularity.value} (it runs with "
                f"{layout.granularity.value})"
            )
        # Codes have a group of their own, which is laid out for the server's policy alone.
        coded = self._plan.policy.demands.event_kind is EventKind.CODED
        if wants.event_kind is EventKind.CODED and not coded:
            return "", (
                f"policy {name} holds entries as codes, for which the cache is laid out at start; "
                f"start the server with --policy {name}, or use codebook false"
            )
        if wants.rest_bits not in (0.0, rest := self._plan.policy.demands.rest_bits):
            why = f"are {rest:g} on this server" if rest else "are not laid out on this server"
            return ".rest_bits", f"rest_bits {why} (--policy.rest_bits)"
        if wants.protect_turns and not self._has_turns:
            return ".protect_turns", NO_TURNS
        if wants.leaves != "off" and self._built.executor.runner.batch.remainders is None:
            return ".remainder", (
                "attention on this server does not read what stands for dropped entries "
                "(--attention-backend); use remainder off"
            )
        log, laid_out = plan.log, "on this server (its query log was laid out for that at start)"
        if wants.query_reduction and wants.logged_dtype not in ("auto", log.dtype):
            return ".query_dtype", f"query_dtype is {log.dtype} {laid_out}"
        if wants.query_reduction not in (None, log.reduction):
            return ".query_reduce", f"query_reduce is {log.reduction} {laid_out}"
        if wants.kept_scores > plan.most_kept_scores:  # they lie outside the pool
            return ".budget", (
                f"policy {name} would keep {wants.kept_scores} scores a head, and there is memory "
                f"for {plan.most_kept_scores} of each of --max-num-seqs rows; ask for less, lower "
                f"--max-num-seqs, or start the server with --policy {name}"
            )
        if (window := policy.event_trigger.num_queries) > plan.max_len:
            return ".window", f"window {window} exceeds the context of {plan.max_len} tokens"
        return None

    def offers(self) -> list[PolicyOffer]:
        """What a client may choose as ``kv_policy``: every policy with arguments that do something
        here, the server's own with its arguments, or why it may not."""
        found, plan, own = [], self._plan, self._plan.config.compression
        for name in policy_names():
            if name == own.policy:
                found.append(PolicyOffer(name, dict(own.policy_args), None))
                continue
            fields, refusal = field_names(policy_class(name)), None
            args = offered_args(fields, plan.max_len)
            if "query_reduce" in fields:
                args["query_reduce"] = plan.log.reduction
            if "remainder" in fields and self._built.executor.runner.batch.remainders is None:
                args["remainder"] = "off"
            try:
                self.resolve({"name": name, **args})
            except RequestError as error:
                refusal = str(error)
            found.append(PolicyOffer(name, args, refusal))
        return found

    def id_of(self, policy: Policy, sequences: Iterable[Sequence]) -> int:
        """A policy's id. A new policy may take the id of an unused one, so memory stays bounded.

        ``sequences`` are all sequences in the engine.
        """
        if policy not in self._ids:
            self._ids[policy] = self._free_id(policy, sequences)
            self._built.executor.set_policy(self._ids[policy], policy)
        return self._ids[policy]

    def _with_servers_statistics(self, policy: Policy) -> Policy:
        """Statistics are read at start; a request may name no other file."""
        if not policy.demands.uses_centres:
            return policy
        if self._plan.statistics is None:
            raise RequestError(
                f"policy {policy.name} wants statistics of the model's queries; start the server "
                f"with --policy {policy.name} (kvserve calibrate makes them)",
                param="kv_policy",
            )
        try:
            self._plan.statistics()
        except ConfigError as error:
            raise RequestError(f"policy {policy.name}: {error}", param="kv_policy") from None
        if policy.demands.stats not in (None, self._own.get("stats")):
            raise RequestError("stats are the server's; leave it out", param="kv_policy.stats")
        return policy.with_statistics(None)

    def _is_pinned(self, policy: Policy) -> bool:
        """Whether the policy keeps its id for good: the server's own policy and ``none`` do."""
        return policy.name == "none" or policy == self._plan.policy

    def _free_id(self, policy: Policy, sequences: Iterable[Sequence]) -> int:
        others = {
            other: policy_id for other, policy_id in self._ids.items() if not self._is_pinned(other)
        }
        if self._is_pinned(policy) or len(others) < REMEMBERED:
            taken = set(self._ids.values())
            return next(number for number in count() if number not in taken)
        in_use = {seq.policy_id for seq in sequences}
        for other, policy_id in others.items():
            if policy_id not in in_use:
                del self._ids[other]
                return policy_id
        raise RequestError(
            f"{REMEMBERED} different policies are in use beside the server's own; retry later, or "
            "use one of them",
            param="kv_policy",
            code="too_many_policies",
        )


def read_policy(spec: Any, max_model_len: int) -> Policy:
    """A request's policy within its bounds; ``RequestError`` names the field that is wrong."""
    try:
        policy = make_policy(spec)
        policy.check_bounds(max_model_len)
    except PolicyError as error:
        raise RequestError(str(error), param=f"kv_policy.{error.argument}") from None
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        # A plug-in may raise these for unexpected values; our own policies name the field.
        raise RequestError(
            f"kv_policy: no policy can be made of it ({type(error).__name__})", param="kv_policy"
        ) from error
    return policy


def offered_args(fields: Collection[str], max_model_len: int) -> dict[str, Any]:
    """Arguments under which a policy with these fields acts within a thirty-second of the context.

    A budget bounds what is generated, and leaves the prompt alone, where the policy can do that.
    """
    size = _LEAST
    while size < min(_MOST, max_model_len // 32):
        size *= 2
    if "buffer" in fields:
        return {"window": size, "buffer": size // 8}
    args: dict[str, Any] = {"budget": size} if "budget" in fields else {}
    if "trigger" in fields:
        args["trigger"] = "threshold"
    if "protect_prompt" in fields:
        args["protect_prompt"] = True
    return args
