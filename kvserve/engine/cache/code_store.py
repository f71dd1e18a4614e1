"""Codes in the cache: blocks viewed as slots and as vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.models.spec import ModelSpec
from kvserve.kernels.coded_entries import CODE_WORDS, Codes, rotated, turns_of
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.code_group import MAX_VECTORS, SLOT_BYTES

assert SLOT_BYTES == 2 * CODE_WORDS


def check_codes(spec: ModelSpec, max_len: int, block_bytes: int) -> int:
    """Slots in an index block; ``ConfigError`` if the model's rows cannot be held as codes."""
    if spec.without_rope or spec.borrowed:
        how = "is transformers' own matter in" if spec.borrowed else "is not in every layer of"
        raise ConfigError(
            f"--policy.codebook: keys are coded before RoPE, which {how} {spec.architecture}; use "
            "--policy.codebook false"
        )
    if spec.rope.kind == "dynamic":
        raise ConfigError(
            "--policy.codebook: keys are coded before RoPE, which dynamic NTK makes depend on the "
            "prompt's length; use --policy.codebook false"
        )
    if 2 * max_len > MAX_VECTORS:
        raise ConfigError(
            f"--max-model-len: a codebook refers to at most {MAX_VECTORS // 2} tokens, got "
            f"{max_len}; lower it or use --policy.codebook false"
        )
    if block_bytes % SLOT_BYTES:
        raise ConfigError(
            f"--block-size: a block of {block_bytes} bytes does not hold whole code slots of "
            f"{SLOT_BYTES} bytes; use a multiple of 16"
        )
    return block_bytes // SLOT_BYTES


class CodeStore:
    """Reads and writes codes in the blocks of one cache (one layer and one KV head a block)."""

    def __init__(self, kv: Tensor, inv_freq: Tensor, max_len: int) -> None:
        """kv: [num_blocks, 1, 2, B, 1, D]; inv_freq: float32 [D / 2]; sequences of ``max_len``."""
        num_blocks, _, _, self.block_size, _, dim = kv.shape
        self.vectors = kv.view(-1, dim)
        self.slots = kv.view(num_blocks, -1).view(torch.int16).view(-1, CODE_WORDS)
        self.slots_per_block = len(self.slots) // num_blocks
        self.vectors_per_block = 2 * self.block_size
        self._inv_freq = inv_freq
        self._turns = turns_of(inv_freq, max_len)

    def codes(self, coded: Tensor, slot_tables: Tensor, vector_tables: Tensor) -> Codes:
        """What attention reads of rows with these tables in one layer."""
        slots = self.slots.view(-1, self.slots_per_block, CODE_WORDS)
        vectors = self.vectors.view(-1, self.vectors_per_block, self.vectors.shape[-1])
        return Codes(slots, vectors, coded, slot_tables, vector_tables, self._turns)

    def turn(self, keys: Tensor, distance: Tensor) -> Tensor:
        """Keys [..., D] rotated by ``distance [...]`` positions more: float32."""
        angle = distance[..., None].float() * self._inv_freq
        return rotated(keys, angle.cos(), angle.sin())
