"""Several ranks on one machine.

Only this file knows torch.distributed. A group is made from a store in the file system, so there is
no global state: a process may hold several groups.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from kvserve.engine.device.distributed import RankGroup

_TIMEOUT = timedelta(seconds=120)
"""A collective fails if a rank keeps the others waiting for longer."""
_FACTOR = 0x5851F42D4C957F2D


class SharedGroup(RankGroup):
    """Communicates through ``backend``, a process group of torch."""

    def __init__(self, rank: int, size: int, backend: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend
        self._noted: Tensor | None = None

    @classmethod
    def join(cls, rank: int, size: int, store: Path, device: str) -> SharedGroup:
        """Wait for the others: over NCCL, each on its own GPU, or over gloo on a CPU."""
        dist: Any = torch.distributed  # its options have no types
        shared = dist.FileStore(str(store), size)
        if device == "cuda":
            nccl = dist.ProcessGroupNCCL.Options()
            nccl._timeout = _TIMEOUT
            return cls(rank, size, dist.ProcessGroupNCCL(shared, rank, size, nccl))
        gloo = dist.ProcessGroupGloo._Options()
        gloo._timeout = _TIMEOUT
        gloo._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        return cls(rank, size, dist.ProcessGroupGloo(shared, rank, size, gloo))

    def sum(self, x: Tensor) -> Tensor:
        """gloo adds the parts of a tensor in different orders, rounding each time: with more than
        two ranks a row's sums would depend on its place in the batch."""
        if x.is_cuda or self.size == 2:
            self._backend.allreduce(x).wait()
            return x
        first, *others = self.gather(x[None], dim=0).float().unbind()
        return x.copy_(sum(others, start=first))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        parts = x.new_empty(self.size, *x.shape)
        self._backend.allgather([list(parts.unbind())], [x.contiguous()]).wait()
        return parts.movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor) -> Tensor:
        self._backend.broadcast(x, 0).wait()
        return x

    def add_to_fingerprint(self, x: Tensor) -> None:
        places = torch.arange(1, 2 * x.numel(), 2, device=x.device) * _FACTOR
        digest = ((x.reshape(-1).long() + 1) * places).sum()
        self._noted = digest if self._noted is None else self._noted * _FACTOR + digest

    def agree(self) -> Tensor | None:
        noted, self._noted = self._noted, None
        if noted is None:
            return None
        # One MAX finds the largest and, negated, the smallest digest. The shift keeps the negation
        # from overflowing.
        ends = torch.stack([noted >> 1, -(noted >> 1)])
        self._backend.allreduce(ends, torch.distributed.ReduceOp.MAX).wait()
        return ends.sum() == 0

    def abort(self) -> None:
        """Make every call that waits for another rank fail."""
        self._backend.abort()
