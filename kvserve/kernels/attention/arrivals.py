"""Counters of the programs that have stored their part of a split row, so that the last one to
arrive can merge the parts. They are zero before and after each launch.

Launches share them, so they have to run one after the other: the engine uses one stream for all,
and graphs are replayed on it. A launch that fails half way leaves counts behind, on a device that
has to be set up anew anyway.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_LEAST = 1 << 14  # 64 KiB: more than all but very large batches have lanes


def arrivals(count: int, device: torch.device) -> Tensor:
    """At least ``count`` zeros of int32 on ``device``, at an address that stays.

    A larger count gets counters of its own, since graphs hold the addresses of earlier ones.
    """
    return _counters(max(_LEAST, 1 << (count - 1).bit_length()), device)


@cache
def _counters(size: int, device: torch.device) -> Tensor:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # They would be set to zero when the graph is replayed, not now.
        raise RuntimeError("a split row has to be attended once before its graph is captured")
    return torch.zeros(size, dtype=torch.int32, device=device)
