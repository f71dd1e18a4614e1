"""Copies between host and device that wait for no more than they need."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve.scheduler.arrays import IntArray


def to_device(array: Any, device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """``array`` (numbers, numpy, or a CPU tensor) as ``dtype`` on ``device``.

    A copy from pageable memory makes torch wait for all work queued on the GPU. A copy from pinned
    memory is queued like a kernel; torch keeps that memory until the copy is done.
    """
    host, kind = torch.as_tensor(array, dtype=dtype), torch.device(device).type
    if kind == "cuda":
        host = host.pin_memory()
    return host if kind == "cpu" else host.to(device, non_blocking=True)


def put(x: Tensor, at: IntArray, new: IntArray) -> None:
    """Write ``new`` to the indices ``at`` of the first dimension of ``x``."""
    if x.device.type == "cpu":  # torch takes longer for a few numbers
        x.numpy()[at] = new
    else:
        x[to_device(at, x.device)] = to_device(new, x.device, x.dtype)


class HostCopy:
    """One copy of several tensors to the host, queued behind the work ``device`` already has."""

    def __init__(self, tensors: Sequence[Tensor], device: str) -> None:
        """``tensors`` of any shapes: float32, or integers (or booleans) that fit int32, or none."""
        self._tensors = [x if x.dtype == torch.float32 else x.int() for x in tensors]
        self._copied: torch.cuda.Event | None = None
        if device != "cuda":
            return
        if tensors:
            words = torch.cat([x.contiguous().view(torch.int32).flatten() for x in self._tensors])
            host = torch.empty(words.shape, dtype=torch.int32, pin_memory=True)
            host.copy_(words, non_blocking=True)
            # These are valid once an event behind the copy is complete.
            parts = zip(host.split([x.numel() for x in self._tensors]), self._tensors, strict=True)
            self._tensors = [part.view(x.dtype).view(x.shape) for part, x in parts]
        self._copied = torch.cuda.Event()
        self._copied.record()

    def wait(self) -> list[np.ndarray[Any, Any]]:
        """Wait for the copy, and the device's work before it: arrays of float32 and int32."""
        if self._copied is not None:
            self._copied.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


class Stopwatch:
    """Measures how long the device takes for the work queued between ``__init__`` and ``stop``."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._started = self._now()
        self._stopped = self._started

    def stop(self) -> None:
        self._stopped = self._now()

    def seconds(self) -> float:
        """The measured seconds; the device must have finished that work."""
        if isinstance(self._started, float):
            return self._stopped - self._started
        return float(self._started.elapsed_time(self._stopped)) / 1e3

    def _now(self) -> Any:
        if self._device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
