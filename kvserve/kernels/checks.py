"""What launchers refuse before anything runs, so that no kernel reads or writes outside the cache.

Shapes are checked. Only the device knows what addresses hold, and kernels skip those outside of the
cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128, 256)
# In the order that kernels number them: over a window's queries, then over a group's heads.
AGGREGATES = ("sum", "sum_squares", "max")
GROUP_AGGREGATES = ("mean", "max", "rms")
# What policies may choose: how a group's heads are reduced, and how places that lie ahead are.
GQA_REDUCTIONS = ("mean", "max", "sum")
FUTURES = ("mean", "max")


def check_head_dim(*tensors: Tensor) -> None:
    """Raises ``ValueError`` unless all end in one supported, contiguous dimension."""
    dim = tensors[0].shape[-1]
    for x in tensors:
        if x.shape[-1] != dim or dim not in HEAD_DIMS or x.stride(-1) != 1:
            raise ValueError(
                f"the last dimension has to be head_dim, one of {HEAD_DIMS}, contiguous and the "
                f"same for all; got shape {list(x.shape)}, strides {list(x.stride())}"
            )


def runs_triton(x: Tensor) -> bool:
    """Whether entries ``x [..., D]`` are for the kernels: on CUDA, of a head dimension they know.

    Others are for the torch references, on any device.
    """
    return x.is_cuda and x.shape[-1] in HEAD_DIMS


def check_dense(name: str, x: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises ``ValueError`` unless ``x``, if it is given, is contiguous, of this shape and type."""
    if x is not None and (x.shape != shape or x.dtype is not dtype or not x.is_contiguous()):
        raise ValueError(
            f"{name} have to be {list(shape)} of {dtype}, contiguous; got {list(x.shape)} of "
            f"{x.dtype}"
        )
