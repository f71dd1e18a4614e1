"""``compatibility.md``: what works with which policy. Each cell is an engine's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from docs.generate.markdown import table
from kvserve.config import EngineConfig
from kvserve.engine.core.engine_core import EngineCore
from kvserve.engine.messages import NewSequence
from kvserve.engine.policies.registry import describe_policies, make_policy
from kvserve.engine.runner.policy_fit import choose_granularity
from kvserve.log import ConfigError, RequestError
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.blocks.code_group import CodeGroup

_INTRO = """\
# Compatibility

Which features work with which policy, and which policies a request may choose on a server that
runs another. Each cell is the answer of an engine that was started for its row. A number stands for
the engine's reason to refuse, listed below; a refused request gets it in a 400.

"""
_PROMPT = 600
_BASE = NewSequence(
    seq_id=0, request_id="", token_ids=[7] * _PROMPT, max_tokens=4, stop_token_ids=[],
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, seed=None, branch=0, min_tokens=0,
    logprobs=None, kv_policy=None,
)  # fmt: skip
_FEATURES: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 5},
    "prompt_logprobs, echo with logprobs": {"prompt_logprobs": 0},
    "penalties, bias, bad words": {"presence_penalty": 1.0, "logit_bias": {5: 1.0}},
    "structured output, tools": {"structured_output": StructuredOutput("json_object", "")},
    "thinking budget": {"thinking_end": 5, "thinking_token_budget": 9},
}
_RANKS = "tensor parallel"
_SWAP = "preempted, with `--swap-space`"
_VARIANTS = (
    {"name": "keydiff", "mode": "block"},
    {"name": "kara", "protect_prompt": False},
    {"name": "kara", "query_reduce": "heads"},
)


def page() -> str:
    policies = _policies()
    reasons: dict[str, int] = {}
    features, choices = [], []
    for policy in policies:
        core = _core(policy)
        cells = [_ask(core, fields, reasons) for fields in _FEATURES.values()]
        cells += [_ask_for_ranks(core, policy, reasons), _when_preempted(core)]
        features.append([f"`{_label(policy)}`", *cells])
        cells = [_ask(core, {"kv_policy": other}, reasons) for other in policies]
        choices.append([f"`{_label(policy)}`", *cells])
    head = ["server's policy"]
    parts = [
        _INTRO,
        f"## Features, with a prompt of {_PROMPT} tokens\n\n",
        table([*head, *_FEATURES, _RANKS, _SWAP], features),
        "\n## A request's `kv_policy` (columns) on a server's policy (rows)\n\n",
        table([*head, *map(_label, policies)], choices),
        "\n## Reasons\n\n",
        *(f"{number}. {reason}\n" for reason, number in reasons.items()),
    ]
    return "".join(parts)


def _policies() -> list[dict[str, Any]]:
    """Every policy with its required fields, then variants that engines refuse more often."""
    needed = {p["name"]: _needed(p["schema"]) for p in describe_policies()}
    plain = [{"name": name, **args} for name, args in needed.items()]
    return plain + [{**needed[variant["name"]], **variant} for variant in _VARIANTS]


def _needed(schema: Mapping[str, Any]) -> dict[str, Any]:
    one_of = schema.get("anyOf", [])
    return {"budget": 128} if {"required": ["budget"]} in one_of else {}


def _label(policy: Mapping[str, Any]) -> str:
    more = [f"{k}={v}" for k, v in policy.items() if k not in ("name", "budget")]
    return " ".join([policy["name"], *more])


def _core(policy: Mapping[str, Any]) -> EngineCore:
    args = {name: value for name, value in policy.items() if name != "name"}
    named = {"policy": policy["name"], "policy_args": args}
    return EngineCore(EngineConfig.from_flat(model="kvserve/tiny", max_num_seqs=4, **named))


def _ask_for_ranks(core: EngineCore, policy: Mapping[str, Any], reasons: dict[str, int]) -> str:
    """The answer of an engine of two ranks, without starting one."""
    layout = core.scheduler.layout
    made = make_policy(policy).for_model(layout.num_layers, layout.block_size)
    try:
        choose_granularity(made, "auto", ranks=2)
    except ConfigError as refused:
        return f"no ({reasons.setdefault(str(refused), len(reasons) + 1)})"
    return "yes"


def _when_preempted(core: EngineCore) -> str:
    """What happens to a preempted sequence; one that had no events is always computed again."""
    if core.info.policy_name == "none":
        return "computed again"
    codes = core.scheduler.blocks.find(CodeGroup)
    return "computed again (holds codes)" if codes is not None else "swapped, once compacted"


def _ask(core: EngineCore, fields: Mapping[str, Any], reasons: dict[str, int]) -> str:
    try:
        core.add(replace(_BASE, **fields))
    except RequestError as refused:
        return f"no ({reasons.setdefault(str(refused), len(reasons) + 1)})"
    core.abort([_BASE.seq_id])
    return "yes"
