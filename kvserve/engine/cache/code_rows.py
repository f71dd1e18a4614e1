"""Rows that are held as codes: their tables on the device, and the blocks as slots and vectors."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.device.transfer import to_device
from kvserve.engine.models.spec import ModelSpec
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.store.coded_entries import CODE_WORDS, Codes, rotated, turns_of
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.code_group import MAX_VECTORS, SLOT_BYTES, CodeSpec
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.row_schema import per_group

assert SLOT_BYTES == 2 * CODE_WORDS


class CodeTables(NamedTuple):
    """All rows' tables on the device, int32 ``[LG, num_rows, R, .]``: blocks of keys and values, of
    logged queries, of code slots and of codebook vectors; and int64 ``[LG, num_rows, R]``, how many
    entries are coded and how many vectors they have."""

    kv: Tensor
    log: Tensor
    code_slots: Tensor
    vectors: Tensor
    coded: Tensor
    num_vectors: Tensor


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


class CodeRows(RowGroup):
    """Index and vector tables; ``coded`` entries and ``num_vectors`` of each lane."""

    spec_type = CodeSpec
    coded: Tensor = per_group()
    num_vectors: Tensor = per_group()
    _codes: tuple[Codes, ...]
    """By layer group, as attention reads them."""

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        assert isinstance(self.spec, CodeSpec) and model.rotary.inv_freq is not None
        self.cache = cache
        self.store = CodeStore(cache.kv, model.rotary.inv_freq, max_len)
        self._codes = tuple(map(self.store.codes, self.coded, *self.tables))

    def after_compaction(self, task: Events, rows: Tensor) -> None:
        if task.codes is not None:
            self.coded[:, rows] = to_device(task.codes.coded, self.coded.device)
            self.num_vectors[:, rows] = to_device(task.codes.num_vectors, self.coded.device)

    def of_batch(self) -> dict[str, Any]:
        return {"codes": self._codes}

    def code_tables(self, kv: Tensor, log: Tensor) -> CodeTables:
        """What ``Coder.observe`` reads, of all rows."""
        index, vectors = self.tables
        return CodeTables(kv, log, index, vectors, self.coded, self.num_vectors)


KINDS.append(CodeRows)
