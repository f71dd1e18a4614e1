"""Attention by kernels that read blocks where they lie, whatever the layout: Triton's, or the
compiled one."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import numpy as np
from torch import Tensor

from kvserve.engine.attention.base import BatchAttention, ForwardBatch, LayerCache, wanted_shares
from kvserve.engine.device.transfer import to_device
from kvserve.kernels.attend.query_segments import QuerySegments
from kvserve.kernels.checks import HEAD_DIMS
from kvserve.late import Late

_newest = Late("kernels.attend.paged_attention:Newest")
_rest = Late("kernels.attend.paged_attention:Rest")


def triton_refusal(device: str, head_dim: int) -> str | None:
    """Why the Triton kernels cannot run here, if they cannot."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on a CPU it needs Triton's interpreter: TRITON_INTERPRET=1"
    if head_dim not in HEAD_DIMS:
        return f"head_dim {head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}"
    return None


class PagedAttention:
    """Calls ``attend``, a kernel with the arguments of ``paged_attention_torch``. Logits are scaled
    by ``scale``, then capped at ``soft_cap`` unless it is 0; blocks hold ``block_size`` entries.
    ``all_starts``: the kernel is told where chunks of one token begin, too.
    """

    replays = replays_chunks = True
    reads_remainders = True

    def __init__(
        self,
        attend: Callable[..., Tensor],
        scale: float,
        block_size: int,
        soft_cap: float = 0.0,
        *,
        all_starts: bool = False,
    ) -> None:
        self._kernel, self._scale, self._soft_cap = attend, scale, soft_cap
        self._block_size, self._all_starts = block_size, all_starts

    def plan(self, batch: ForwardBatch) -> BatchAttention:
        """Takes bounds from what the host knows, so that it does not wait for the device."""
        newest = [] if batch.newest is None else self._chunks(batch.newest)
        chunks = self._chunks(batch)
        rest = [] if batch.rest is None else self._chunks(batch.rest)

        def attend(
            layer: int,
            q: Tensor,
            cache: LayerCache,
            shares: Tensor | None = None,
            sinks: Tensor | None = None,
        ) -> Tensor:
            keys, values, group = cache.keys_values(layer)
            codes, remainders, more = batch.codes, batch.remainders, None
            if batch.newest is not None:
                k, v, own = cache.newest_keys_values(layer)
                more = _newest(k, v, batch.newest.tables[own], newest[own], batch.newest.recent)
            beside = {}
            if batch.rest is not None:
                held = cache.rest_keys_values(layer)
                beside = {"rest": _rest(*held, batch.rest.tables[0], rest[0])}
            return self._kernel(
                *(q, keys, values, batch.tables[group], chunks[group], self._scale),
                codes=None if codes is None else codes[group],
                shares=wanted_shares(shares, batch.recent),
                remainder=None if remainders is None else remainders.layer(layer),
                sinks=sinks,
                soft_cap=self._soft_cap,
                newest=more,
                **beside,
            )

        return attend

    def _chunks(self, batch: ForwardBatch) -> list[QuerySegments]:
        """Of each layer group."""
        device, max_chunk = batch.tables.device, int(np.diff(batch.starts).max(initial=1))
        rows, starts = to_device(batch.rows, device), None
        if self._all_starts or max_chunk > 1:
            starts = to_device(batch.starts, device)
        size = batch.block_tokens or self._block_size
        max_held = batch.most_seen or int(batch.columns.max(initial=0)) * size
        firsts, always = (
            [None] * len(batch.last) if x is None else x.contiguous()
            for x in (batch.first, batch.always)
        )
        return [
            QuerySegments(rows, last, max_held, starts, max_chunk, *shown)
            for last, *shown in zip(batch.last.contiguous(), firsts, always, strict=True)
        ]
