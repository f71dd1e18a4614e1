"""What a layer keeps of rows beside entries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LayerStates(NamedTuple):
    """One layer's states of n rows: tails ``[n, channels, columns]``, recurrent ``[n, ...]``."""

    tail: Tensor
    recurrent: Tensor | None
