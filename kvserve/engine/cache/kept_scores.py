"""Scores that policies keep from event to event, outside the pool."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import RowMoves
from kvserve.scheduler.messages.saved_row import NO_PLACE


class KeptScores:
    """Scores from event to event: [rows, L, Hkv, m] on the device, as wide as any policy has asked
    for; it never narrows."""

    def __init__(self, layout: KVLayout, max_rows: int, device: str) -> None:
        self._lanes = max_rows, layout.num_layers, layout.num_kv_heads
        self._device = device
        self._scores = torch.zeros(0)
        self._parked: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return self._scores.nbytes

    def first(self, count: int) -> Tensor:
        """[rows, L, Hkv, count] for a policy that keeps so many."""
        if self._scores.numel() == 0 or self._scores.shape[-1] < count:
            wider = torch.zeros((*self._lanes, count), device=self._device)
            if self._scores.numel():
                wider[..., : self._scores.shape[-1]] = self._scores
            self._scores = wider
        return self._scores[..., :count]

    def forget(self) -> None:
        """Free all; no sequence may need them any more."""
        self._scores = torch.zeros(0)
        self._parked.clear()

    def move(self, to: Tensor, source: Tensor) -> None:
        """Put the rows ``source`` in the place of the rows ``to``, all at once."""
        if self._scores.numel():
            self._scores[to] = self._scores[source]

    def swap(self, moves: RowMoves) -> None:
        """Swap scores to host memory and back with their rows; drop those discarded."""
        for place in moves.discarded:
            self._parked.pop(place, None)  # not there if the step that parked it failed
        if self._scores.numel():
            for task in moves.outs:
                if task.place != NO_PLACE:
                    self._parked[task.place] = self._scores[task.row].cpu()
        for task in moves.ins:
            scores = self._parked.pop(task.place, None)
            if scores is not None and self._scores.numel():
                # Meanwhile other policies may have widened the tensor.
                places = slice(scores.shape[-1])
                self._scores[task.row, ..., places] = to_device(scores, self._device, scores.dtype)
