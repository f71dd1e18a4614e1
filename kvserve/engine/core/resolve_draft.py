"""Which model drafts: its checkpoint, and how its entries lie in blocks of the engine's pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from kvserve.config import EngineConfig
from kvserve.engine.cache.draft_rows import draft_layout
from kvserve.engine.models.hub import find_model
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.streaming_llm import StreamingLLM
from kvserve.engine.runner.draft_model import DraftPlan
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.draft_group import DraftBound
from kvserve.scheduler.layout import KVLayout
from kvserve.speculative_config import wrong


def draft_of(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    max_len: int,
    block_size: int,
    block_bytes: int,
) -> DraftPlan | None:
    """The draft model of ``--speculative-config``, if it names one, beside the model of ``spec``;
    the pool has blocks of ``block_bytes``.

    ``ConfigError`` names the key of what cannot draft.
    """
    speculation = config.scheduler.speculation
    if speculation is None or speculation.draft_model is None:
        return None
    name = speculation.draft_model
    own = replace(config.model, model=name, revision=None, hf_overrides={}, quantization=None)
    with _naming_the_draft():
        weights, code = own.load_format != "dummy", own.trust_remote_code
        directory = find_model(name, None, own.download_dir, weights=weights, code=code)
        drafting = choose_spec(directory, own)
    _check(name, drafting, spec, max_len)
    shape = KVLayout(
        drafting.num_layers, drafting.num_kv_heads, drafting.head_dim, block_size=block_size
    )
    layout = draft_layout(shape, block_bytes, dtype.itemsize)
    if layout is None or block_bytes % dtype.itemsize:
        raise wrong("model", f"a block of {block_bytes} bytes holds no entry; raise --block-size")
    bound = _bound(speculation.draft_policy, layout.block_size)
    plan = DraftPlan(
        own, directory, drafting, layout, dtype, device, config.attention_backend, bound
    )
    with _naming_the_draft():
        plan.chosen_attention()
    return plan


def load_draft(plan: DraftPlan | None) -> Transformer | None:
    """The draft model with its weights, if there is one."""
    if plan is None:
        return None
    with _naming_the_draft():
        return plan.load()


def _check(name: str, drafting: ModelSpec, spec: ModelSpec, max_len: int) -> None:
    """``ConfigError`` if the draft model cannot guess for the model of ``spec``."""
    if drafting.vocab_size != spec.vocab_size:
        raise wrong(
            "model",
            f"{name} has a vocabulary of {drafting.vocab_size} tokens and --model has "
            f"{spec.vocab_size}; a draft model guesses tokens of the same vocabulary",
        )
    if drafting.max_position < max_len:
        raise wrong(
            "model",
            f"{name} has a context of {drafting.max_position} tokens, and sequences may have "
            f"{max_len}; lower --max-model-len",
        )


_BOUNDS = ("name", "budget", "sinks")
"""What of a policy bounds a draft model's cache, in whole blocks; nothing else may be given."""


def _bound(policy: str | Mapping[str, Any] | None, block_tokens: int) -> DraftBound | None:
    """What a ``kv_policy`` leaves of a row, in whole blocks; ``ConfigError`` for one that would
    have to look at the draft model's queries."""
    if policy is None:
        return None
    try:
        made = make_policy(policy)
    except PolicyError as error:
        raise wrong("kv_policy", str(error)) from None
    if made.name == "none":
        return None
    if not isinstance(made, StreamingLLM):
        raise wrong(
            "kv_policy",
            f"{made.name} scores entries, and nothing is observed of a draft model; it can be "
            f"{StreamingLLM.name} or none",
        )
    for key in {} if isinstance(policy, str) else policy:
        if key not in _BOUNDS:
            raise wrong("kv_policy", f"{key}: a draft model's cache knows {', '.join(_BOUNDS)}")
    assert made.budget is not None
    front, most = -(-made.sinks // block_tokens), made.budget // block_tokens
    if most <= front:
        least = (front + 1) * block_tokens
        why = f"its entries go in blocks of {block_tokens}, and sinks and the newest have their own"
        raise wrong("kv_policy", f"budget: {made.budget} is below {least}; {why}")
    return DraftBound(front, most)


@contextmanager
def _naming_the_draft() -> Iterator[None]:
    """Let errors about a checkpoint say that it is the draft model's."""
    try:
        yield
    except ConfigError as error:
        raise wrong("model", str(error).removeprefix("--model: ")) from None
