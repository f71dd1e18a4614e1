"""What decoding over a compacted cache must equal: dense attention that sees the kept sets only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvserve.engine.inspect import Event


def load_dense(directory: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def dense_logits(model: PreTrainedModel, tokens: list[int], events: Sequence[Event]) -> Tensor:
    """One dense pass of transformers; every query sees what its layer and head then held."""
    heads = model.config.num_attention_heads
    group = heads // model.config.num_key_value_heads
    hooks = []
    for layer, block in enumerate(model.model.layers):
        visible = torch.ones(heads, len(tokens), len(tokens), dtype=torch.bool)
        for event in events:
            # Later events overwrite the rows they share.
            for head in range(heads):
                visible[head, event.seen :, : event.seen] = False
                held = torch.as_tensor(event.held[layer, head // group]).long()
                visible[head, event.seen :, held] = True
        mask = torch.where(visible.tril(), 0.0, -torch.inf)[None]
        hooks.append(
            block.self_attn.register_forward_pre_hook(
                lambda _, args, kwargs, mask=mask: (args, {**kwargs, "attention_mask": mask}),
                with_kwargs=True,
            )
        )
    try:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([tokens])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return logits
