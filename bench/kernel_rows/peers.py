"""Decode attention of other libraries over the same blocks, if they are installed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from bench.kernel_rows.cases import SHAPES, Case, Setting, attention_cases
from kvserve.scheduler.layout import Granularity

Run = Callable[[], Tensor]


def _flashinfer(setting: Setting, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Run:
    import flashinfer

    q_heads, kv_heads, dim = SHAPES[setting.shape]
    work = torch.empty(256 << 20, dtype=torch.uint8, device=setting.device)
    grouped = q_heads // kv_heads >= 4
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "NHD", use_tensor_cores=grouped)
    ends = torch.arange(setting.rows + 1, dtype=torch.int32, device=setting.device)
    in_last = torch.full_like(ends[1:], (setting.context - 1) % setting.sizes.block + 1)
    wrapper.plan(
        ends * table.shape[1],
        table.flatten(),
        in_last,
        q_heads,
        kv_heads,
        dim,
        setting.sizes.block,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, (keys, values))


def _flash_attn_3(setting: Setting, q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Run:
    from flash_attn_interface import flash_attn_with_kvcache

    held = torch.full((setting.rows,), setting.context, dtype=torch.int32, device=setting.device)

    def attend() -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            q[:, None], keys, values, cache_seqlens=held, page_table=table, causal=True
        )
        return out[:, 0]

    return attend


PEERS = {"flashinfer": _flashinfer, "flash_attn_interface": _flash_attn_3}
"""By the module that must be installed. Not run yet."""


def peer_case(module: str, setting: Setting) -> Case | None:
    """A peer's decode attention beside the kernel's; peers support only one table per sequence."""
    if find_spec(module) is None or setting.granularity is not Granularity.MODEL:
        return None
    cache, tables = setting.cache()
    (own,) = (case for case in attention_cases(setting, cache, tables) if case.kernel == "decode")
    assert isinstance(own.triton, partial)
    q, keys, values, table, *_ = own.triton.args
    attend = PEERS[module](setting, q, keys, values, table[:, 0])
    ours = partial(own.triton.func, *own.triton.args)  # without a remainder, which no peer has
    return replace(own, kernel=f"decode by {module}", triton=attend, torch=ours)
