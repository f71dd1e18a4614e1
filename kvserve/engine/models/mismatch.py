"""What is said of a tensor whose shape is of another model."""

from __future__ import annotations

from collections.abc import Sequence

from kvserve.engine.models.spec import ModelSpec


def named(spec: ModelSpec, shape: Sequence[int], wanted: Sequence[int]) -> str:
    """Which fields of config.json give the first size that differs, if it is plain."""
    experts = spec.experts
    sizes = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads * head_dim": spec.num_heads * spec.head_dim,
        "num_key_value_heads * head_dim": spec.num_kv_heads * spec.head_dim,
        "head_dim": spec.head_dim,
        "num_experts": 0 if experts is None else experts.count,
        "moe_intermediate_size": 0 if experts is None else experts.intermediate_size,
    }
    differs = [b for a, b in zip(shape, wanted, strict=False) if a != b]
    named = [name for name, size in sizes.items() if differs and size == differs[0]]
    return f" ({' or '.join(named)})" if named else ""
