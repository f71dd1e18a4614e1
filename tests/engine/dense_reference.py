"""What decoding over a compacted cache must equal: dense attention that sees the kept sets only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvserve.engine.frontend.inspect import Event
from kvserve.entry_format import EntryFormat
from kvserve.kernels.quantized_entries import quantize


@dataclass(frozen=True)
class DensePass:
    """logits [T, V]; queries [L, Hq, T, D] and keys [L, Hkv, T, D] after RoPE, values in the shape
    of keys, and sinks [L, Hq] if there are any, of the layers that see all tokens."""

    logits: Tensor
    queries: Tensor
    keys: Tensor
    values: Tensor
    sinks: Tensor | None


def load_dense(directory: Path) -> PreTrainedModel:
    how: Any = {"dtype": torch.float32, "attn_implementation": "eager"}  # it takes masks by head
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, **how)
    return model.eval()


def dense_pass(
    model: PreTrainedModel,
    tokens: list[int],
    events: Sequence[Event],
    *,
    pruned: bool = False,
    form: EntryFormat | None = None,
) -> DensePass:
    """One dense pass of transformers; every query sees what its layer and head then held: what
    events say of KV heads, or of query heads. Keys and values are rounded to ``form``, if given,
    except those that a query reads as they were computed.

    With ``pruned`` the first event happened between layers: its own tokens see its outcome too.
    """
    heads = model.config.num_attention_heads
    hooks, values = [], list[Tensor]()
    full = full_layers(model)
    for layer, block in enumerate(model.model.layers):
        visible = torch.ones(heads, len(tokens), len(tokens), dtype=torch.bool)
        for number, event in enumerate(events if layer in full else ()):
            # Later events overwrite the rows they share.
            first = 0 if pruned and number == 0 else event.seen
            for head in range(heads):
                visible[head, first:, : event.seen] = False
                of_layer = event.held[full.index(layer)]
                held = torch.as_tensor(of_layer[head * len(of_layer) // heads]).long()
                visible[head, first:, held[held >= 0]] = True
        if layer not in full:
            visible = visible.triu(1 - model.config.sliding_window)
        mask = torch.where(visible.tril(), 0.0, -torch.inf)[None]
        if layer in full:
            noting = _noting(model, values, form)
            hooks.append(block.self_attn.v_proj.register_forward_hook(noting))
        hooks.append(
            block.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
                with_kwargs=True,
            )
        )
    try:
        exact = exact_entries(len(tokens), events, form, pruned=pruned)
        with torch.no_grad(), _rotated(model, form) as rotated, _rounded(model, form, exact):
            logits: Tensor = model(torch.tensor([tokens])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    seen = [rotated[layer] for layer in full]
    queries, keys = (torch.cat(layers) for layers in zip(*seen, strict=True))
    attention = [model.model.layers[layer].self_attn for layer in full]
    sinks = [module.sinks.data for module in attention if hasattr(module, "sinks")]
    given = torch.cat(values).transpose(1, 2)
    return DensePass(logits, queries, keys, given, torch.stack(sinks) if sinks else None)


def full_layers(model: PreTrainedModel) -> list[int]:
    """The layers that see all tokens."""
    config = model.config
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def exact_entries(
    length: int, events: Sequence[Event], form: EntryFormat | None, *, pruned: bool = False
) -> Tensor:
    """Which entries each token reads as they were computed, bool [T, T]: those from the last
    multiple of ``newest`` on, but none from before the last event that dropped any."""
    if form is None or not form.newest:
        return torch.zeros(length, length, dtype=torch.bool)
    at = torch.arange(length)
    first = at // form.newest * form.newest
    for number, event in enumerate(events):
        if pruned and number == 0:
            first[: event.seen] = length
        if (event.held >= 0).sum(-1).min() < event.before or (pruned and number == 0):
            first[event.seen :] = first[event.seen :].clamp(min=event.seen)
    return (at >= first[:, None]) & (at <= at[:, None])


@contextmanager
def _rounded(model: PreTrainedModel, form: EntryFormat | None, exact: Tensor) -> Iterator[None]:
    """Attention over entries that are rounded to ``form``, unless they are ``exact``."""
    module: Any = sys.modules[type(model).__module__]
    original = module.eager_attention_forward

    def attend(
        layer: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, **how: Any
    ) -> Any:
        assert form is not None
        both = [
            torch.cat([quantize(x, of).widened(), x], dim=2)
            for x, of in ((k, form.key), (v, form.value))
        ]
        masks = [attention_mask.masked_fill(hidden, -torch.inf) for hidden in (exact, ~exact)]
        return original(layer, q, *both, torch.cat(masks, dim=-1), **how)

    if form is not None:
        module.eager_attention_forward = attend
    try:
        yield
    finally:
        module.eager_attention_forward = original


def _noting(
    model: PreTrainedModel, found: list[Tensor], form: EntryFormat | None
) -> Callable[..., None]:
    """A hook behind a projection: adds what it gives, rounded, to ``found``, [1, T, H, D]."""
    heads = model.config.num_key_value_heads

    def note(module: Any, args: Any, values: Tensor) -> None:
        values = values.unflatten(-1, (heads, -1))
        found.append(values if form is None else quantize(values, form.value).widened())

    return note


@contextmanager
def _rotated(
    model: PreTrainedModel, form: EntryFormat | None
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Queries and keys of every layer after RoPE, [1, H, T, D], as the model runs; keys rounded."""
    module: Any = sys.modules[type(model).__module__]
    original, seen = module.apply_rotary_pos_emb, []

    def watched(*args: Any, **kwargs: Any) -> Any:
        queries, keys = original(*args, **kwargs)
        seen.append((queries, keys if form is None else quantize(keys, form.key).widened()))
        return queries, keys

    module.apply_rotary_pos_emb = watched
    try:
        yield seen
    finally:
        module.apply_rotary_pos_emb = original
