"""From host arrays to the device without waiting for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(array: Any, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """``array`` (numbers, numpy, or a CPU tensor) as ``dtype`` on ``device``.

    A copy from pageable memory makes torch wait for all that the GPU was given before; one from
    pinned memory, which torch keeps until the copy is done, is queued like a kernel.
    """
    host = torch.as_tensor(array, dtype=dtype)
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
