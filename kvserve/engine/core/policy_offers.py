"""What a client may choose as ``kv_policy``: every policy with arguments that do something here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from kvserve.config import EngineConfig
from kvserve.engine.core.request_policies import RequestPolicies
from kvserve.engine.core.startup import BuiltEngine
from kvserve.engine.messages import PolicyOffer
from kvserve.engine.policies.parts.arguments import field_names
from kvserve.engine.policies.registry import policy_class, policy_names
from kvserve.log import RequestError

_LEAST, _MOST = 64, 512
"""Bounds of an offered window or budget, in tokens."""


def policy_offers(config: EngineConfig, built: BuiltEngine) -> list[PolicyOffer]:
    """All policies: the server's own with its arguments, the others with ``offered_args``."""
    policies = RequestPolicies(config, built)
    return [_offer(name, policies, config, built) for name in policy_names()]


def _offer(
    name: str, policies: RequestPolicies, config: EngineConfig, built: BuiltEngine
) -> PolicyOffer:
    fields = field_names(policy_class(name))
    if name == config.compression.policy:
        args = dict(config.compression.policy_args)
    else:
        args = offered_args(fields, built.info.max_model_len)
        if "query_reduce" in fields:
            args["query_reduce"] = built.query_reduce
        if "remainder" in fields and built.executor.runner.batch.remainders is None:
            args["remainder"] = "off"
    try:
        policies.resolve({"name": name, **args})
    except RequestError as error:
        return PolicyOffer(name, args, str(error))
    return PolicyOffer(name, args, None)


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
