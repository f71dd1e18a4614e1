"""The cache's one tensor, and its two readings: blocks of keys and values, blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch, StoreKV, StoreQueries
from kvserve.engine.code_store import CodeStore
from kvserve.engine.transfer import to_device
from kvserve.kernels.store_kv import store_kv, store_queries
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import SwapTask

SWAP_STAGING_BYTES = 64 * 1024 * 1024


class KVCache:
    """``kv [num_blocks, L/LG, 2, B, Hkv/R, D]``; ``query_log`` is the same memory as log blocks.

    ``log_heads`` is how many query vectors a token logs: Hkv (mean over each GQA group) or Hq.
    With ``fp8_log`` they are stored as e4m3 numbers, in one byte each. ``codes`` reads and writes
    the same memory as codes, where rows may be held so.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        log_heads: int,
        dtype: torch.dtype,
        device: str,
        *,
        fp8_log: bool = False,
        num_host_blocks: int = 0,
        store_kv: StoreKV = store_kv,
        store_queries: StoreQueries = store_queries,
    ) -> None:
        self.layout = layout
        self.codes: CodeStore | None = None
        self.log_heads = log_heads
        self._store_kv, self._store_queries = store_kv, store_queries
        self.kv = torch.zeros(layout.cache_shape(num_blocks), dtype=dtype, device=device)
        # Block 0 is a null block here too. Pages that no sequence was parked in cost no memory.
        host_shape = layout.cache_shape(num_host_blocks + 1)
        self.host = torch.empty(host_shape, dtype=dtype, pin_memory=device == "cuda")
        self.log_block_tokens = log_block_tokens(
            layout, log_heads, dtype.itemsize if fp8_log else 1
        )
        memory = self.kv.view(torch.uint8) if fp8_log else self.kv
        self.query_log = memory.view(
            num_blocks,
            layout.layers_per_block,
            self.log_block_tokens,
            log_heads // layout.rows,
            layout.head_dim,
        )

    def store(self, layer: int, batch: ForwardBatch, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one layer's new keys and values, and its queries where they are logged.

        Before them, what ``batch.rebuilt`` names. q: [T, Hq, D]; k, v: [T, Hkv, D].
        """
        if batch.rebuilt is not None and self.codes is not None:
            self.codes.rebuild(layer, batch.rebuilt)
        group, place = divmod(layer, self.layout.layers_per_block)
        self._store_kv(self.kv, place, batch.slots[group], k, v)
        if batch.query_slots is not None:
            self._store_queries(self.query_log, place, batch.query_slots[group], q)

    def swap(self, outs: tuple[SwapTask, ...], ins: tuple[SwapTask, ...]) -> None:
        """Copy blocks to host memory, then back. Logged queries are blocks like others."""
        for task in outs:
            for device, host in self._blocks(task):
                self.host[host] = self.kv[device].to(self.host.device)
        for task in ins:
            for device, host in self._blocks(task):
                self.kv[device] = self.host[host].to(self.kv.device)

    def _blocks(self, task: SwapTask) -> Iterator[tuple[Tensor, Tensor]]:
        """Places of as many blocks at a time as are gathered in ``SWAP_STAGING_BYTES``."""
        count = max(1, SWAP_STAGING_BYTES // (self.kv[0].numel() * self.kv.itemsize))
        for at in range(0, len(task.device_blocks), count):
            part = slice(at, at + count)
            device = to_device(task.device_blocks[part], self.kv.device)
            yield device, to_device(task.host_blocks[part], "cpu")

    def logged(self, entries: Tensor) -> Tensor:
        """Entries read from ``query_log`` as numbers: e4m3 ones are left to who computes."""
        return entries.view(torch.float8_e4m3fn) if entries.dtype is torch.uint8 else entries

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        group, place = divmod(layer, self.layout.layers_per_block)
        return self.kv[:, place, 0], self.kv[:, place, 1], group


def log_block_tokens(layout: KVLayout, log_heads: int, per_number: int = 1) -> int:
    """Tokens whose queries one block holds; ``per_number`` of its numbers fit in a cached one.

    Raises ``ValueError`` where entries do not fill a layer's part of a block exactly.
    """
    numbers = 2 * layout.block_size * layout.num_kv_heads * per_number
    if numbers % log_heads:
        raise ValueError(
            f"a block of {layout.block_size} tokens cannot hold whole queries of {log_heads} heads"
        )
    return numbers // log_heads
