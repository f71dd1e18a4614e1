"""What is done to the cache's blocks, by each implementation: an engine chooses one at start-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from kvserve.kernels.checks import HEAD_DIMS
from kvserve.late import LateModule

move_few_triton = LateModule("kernels.move.move_few_triton")
move_kv = LateModule("kernels.move.move_kv")
move_kv_triton = LateModule("kernels.move.move_kv_triton")
move_levels = LateModule("kernels.move.move_levels")
move_levels_triton = LateModule("kernels.move.move_levels_triton")
few_bits = LateModule("kernels.store.few_bits")
few_bits_triton = LateModule("kernels.store.few_bits_triton")
int4_log = LateModule("kernels.store.int4_log")
int4_log_triton = LateModule("kernels.store.int4_log_triton")
quantized_entries = LateModule("kernels.store.quantized_entries")
quantized_entries_triton = LateModule("kernels.store.quantized_entries_triton")
store_kv = LateModule("kernels.store.store_kv")
store_kv_triton = LateModule("kernels.store.store_kv_triton")
turning = LateModule("kernels.store.turning")
turning_triton = LateModule("kernels.store.turning_triton")


class FewKernels(NamedTuple):
    """The same of entries in few bits (``few_bits.py``, ``turning.py``), and what makes ``blocks``
    of a pool and turns any vectors."""

    store: Callable[..., None]
    gather: Callable[..., Tensor]
    move: Callable[..., None]
    turn: Callable[..., Tensor]
    store_layers: Callable[..., None] = few_bits.store_layers_torch
    blocks: Callable[..., Any] = few_bits.FewBlocks
    turn_vectors: Callable[..., Tensor] = turning.turn_torch


class StorageKernels(NamedTuple):
    """One implementation. The references in torch say what each does; all have their arguments."""

    store_kv: Callable[..., None]
    gather_kv: Callable[..., Tensor]
    move_kv: Callable[..., None]
    store_queries: Callable[..., None]
    gather_queries: Callable[..., Tensor]
    store_int4: Callable[..., None]
    gather_int4: Callable[..., Any]
    store_levels: Callable[..., None]
    gather_levels: Callable[..., Tensor]
    move_levels: Callable[..., None]
    few: FewKernels
    store_rotated: Callable[..., Tensor] | None = None
    """``rotate_and_store_torch``, if that is one launch; ``None``: keys come rotated."""


TORCH = StorageKernels(
    *(store_kv.store_kv_torch, move_kv.gather_kv_torch, move_kv.move_kv_torch),
    *(store_kv.store_queries_torch, move_kv.gather_torch),
    *(int4_log.store_int4_torch, int4_log.gather_int4_torch),
    quantized_entries.store_levels_torch,
    *(move_levels.gather_levels_torch, move_levels.move_levels_torch),
    FewKernels(
        *(few_bits.store_few_torch, few_bits.gather_few_torch, few_bits.move_few_torch),
        turning.turn_torch,
    ),
)
COMPILED = StorageKernels(
    *(store_kv.store_kv_cpu, move_kv.gather_kv_cpu, move_kv.move_kv_cpu),
    *(store_kv.store_queries_cpu, move_kv.gather_torch),
    *(int4_log.store_int4_cpu, int4_log.gather_int4_cpu),
    quantized_entries.store_levels_cpu,
    *(move_levels.gather_levels_cpu, move_levels.move_levels_cpu),
    FewKernels(
        *(few_bits.store_few_cpu, few_bits.gather_few_cpu, few_bits.move_few_cpu),
        turning.turn_cpu,
        few_bits.store_layers_cpu,
    ),
)
TRITON = StorageKernels(
    store_kv_triton.store_kv_triton,
    *(move_kv_triton.gather_kv_triton, move_kv_triton.move_kv_triton),
    *(store_kv_triton.store_queries_triton, move_kv_triton.gather_triton),
    *(int4_log_triton.store_int4_triton, int4_log_triton.gather_int4_triton),
    quantized_entries_triton.store_levels_triton,
    *(move_levels_triton.gather_levels_triton, move_levels_triton.move_levels_triton),
    FewKernels(
        few_bits_triton.store_few_triton,
        *(move_few_triton.gather_few_triton, move_few_triton.move_few_triton),
        turning_triton.turn_triton,
    ),
    store_kv_triton.rotate_and_store_triton,
)


def by_device(device: str, head_dim: int) -> StorageKernels:
    """Beside an attention that has none of its own: Triton's on CUDA, as far as they know heads of
    this size, but for levels; torch's elsewhere."""
    if device != "cuda":
        return TORCH
    if head_dim in HEAD_DIMS:
        levels = TORCH.store_levels, TORCH.gather_levels, TORCH.move_levels, TORCH.few
        return StorageKernels(*TRITON[:7], *levels)
    return TORCH._replace(store_kv=TRITON.store_kv, store_queries=TRITON.store_queries)
