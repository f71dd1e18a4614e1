"""The cache's one tensor, and its two readings: blocks of keys and values, blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvserve.engine.attention.base import ForwardBatch, StoreInt4, StoreKV, StoreQueries
from kvserve.engine.cache.code_store import CodeStore
from kvserve.engine.cache.query_log import LogForm, QueryLog
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.int4_log import store_int4
from kvserve.kernels.store_kv import store_kv, store_queries
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.output import SwapTask

SWAP_STAGING_BYTES = 64 * 1024 * 1024
"""Most that blocks take at once on their way to host memory or back, on the device and pinned."""


class KVCache:
    """``kv [num_blocks, L/LG, 2, B, Hkv/R, D]``; ``query_log`` is the same memory as log blocks.

    ``codes`` reads and writes it as codes, where rows may be held so.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        log: LogForm,
        dtype: torch.dtype,
        device: str,
        *,
        num_host_blocks: int = 0,
        store_kv: StoreKV = store_kv,
        store_queries: StoreQueries = store_queries,
        store_int4: StoreInt4 = store_int4,
    ) -> None:
        self.layout = layout
        self.codes: CodeStore | None = None
        self._store_kv = store_kv
        self.kv = torch.zeros(layout.cache_shape(num_blocks), dtype=dtype, device=device)
        # Block 0 is a null block here too. Not pinned: pages that no sequence was parked in cost no
        # memory, and pinned memory is rounded up to a power of two.
        self.host = torch.empty(layout.cache_shape(num_host_blocks + 1), dtype=dtype, device="cpu")
        staged = min(num_host_blocks, max(1, SWAP_STAGING_BYTES // self.kv[0].nbytes))
        self._staging = torch.empty(
            layout.cache_shape(staged), dtype=dtype, device="cpu", pin_memory=device == "cuda"
        )
        self.query_log = QueryLog(self.kv, layout, log, store_queries, store_int4)
        self.logs_shares = self.query_log.holds_shares

    def store(self, layer: int, batch: ForwardBatch, k: Tensor, v: Tensor) -> None:
        """Write one layer's new keys and values: k, v [T, Hkv, D].

        Before them, what ``batch.rebuilt`` names.
        """
        if batch.rebuilt is not None and self.codes is not None:
            self.codes.rebuild(layer, batch.rebuilt)
        group, place = divmod(layer, self.layout.layers_per_block)
        self._store_kv(self.kv, place, batch.slots[group], k, v)

    def log(self, layer: int, batch: ForwardBatch, q: Tensor, shares: Tensor | None) -> None:
        """Write one layer's queries [T, Hq, D] where they are logged, with ``shares`` [T, Hq]."""
        if batch.query_slots is not None:
            group, place = divmod(layer, self.layout.layers_per_block)
            self.query_log.store(place, batch.query_slots[group], q, shares)

    def swap(self, outs: tuple[SwapTask, ...], ins: tuple[SwapTask, ...]) -> None:
        """Copy blocks to host memory, then back. Logged queries are blocks like others."""
        for task in outs:
            for device, host, staged in self._blocks(task):
                staged.copy_(self.kv[device])
                self.host[host] = staged
        for task in ins:
            for device, host, staged in self._blocks(task):
                torch.index_select(self.host, 0, host, out=staged)
                self.kv[device] = staged.to(self.kv.device)

    def _blocks(self, task: SwapTask) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As many blocks at a time as are staged: their places, there and here, and room for them.

        The room is used again at once, so copies from and to it are waited for.
        """
        count = max(1, len(self._staging))
        for at in range(0, len(task.device_blocks), count):
            part = slice(at, at + count)
            host = to_device(task.host_blocks[part], "cpu")
            device = to_device(task.device_blocks[part], self.kv.device)
            yield device, host, self._staging[: len(host)]

    def keys_values(self, layer: int) -> tuple[Tensor, Tensor, int]:
        """Blocks of one layer, ``[num_blocks, B, Hkv/R, D]`` twice, and its layer group."""
        group, place = divmod(layer, self.layout.layers_per_block)
        return self.kv[:, place, 0], self.kv[:, place, 1], group
