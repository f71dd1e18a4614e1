"""PyramidInfer's events (arXiv 2405.12532): one inside of the prompt's forward, then periodic ones.

What each layer keeps follows from its depth and the prompt's length alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.triggers.trigger import EventKind, EvictionSpec, RowState, Trigger
from kvserve.scheduler.triggers.whole_row import whole_row


@dataclass(frozen=True)
class Taper:
    """A share that falls with depth, from 1 in the first layer towards ``last``."""

    last: float
    shape: str = "cosine"

    def of(self, layer: int, num_layers: int) -> float:
        """The share of one of ``num_layers`` layers."""
        depth = layer / num_layers
        left = (math.cos(math.pi * depth) + 1) / 2 if self.shape == "cosine" else 1 - depth
        return (1 - self.last) * left + self.last


@dataclass(frozen=True)
class Pruned(Trigger):
    """A prompt is computed in one step, and from layer to layer fewer of its tokens go on.

    The newest ``recent_ratio`` of a prompt's tokens and one more always go on. After every
    ``interval``-th layer a ``prompt`` share of the tokens before them goes on, while more than
    ``min_context`` are left. This event is part of the forward, and what it leaves is known
    beforehand. Later, whenever ``period`` more tokens are older than as many recent ones, an event
    keeps ``share`` of the ``period``, times the layer's ``generated`` share.
    """

    num_queries = 1
    event_kind = EventKind.PRUNED
    recent_ratio: float
    min_context: int
    prompt: Taper
    interval: int
    period: int
    generated: Taper
    share: float

    def recent(self, num_prompt: IntArray) -> IntArray:
        """Newest tokens, whose queries score the others."""
        return (num_prompt * self.recent_ratio).astype(np.int32) + 1

    def prunes(self, num_prompt: IntArray) -> IntArray:
        """Which prompts are long enough to be computed in one step and pruned."""
        return np.asarray(num_prompt - self.recent(num_prompt) > self.min_context)

    def prunes_prompt(self, num_prompt: int) -> bool:
        return bool(self.prunes(np.array(num_prompt)))

    def prompt_lengths(self, num_prompt: int, num_layers: int) -> list[int]:
        """Tokens of a prompt that each layer computes and holds."""
        recent = int(num_prompt * self.recent_ratio) + 1
        context, lengths = num_prompt - recent, []
        for layer in range(num_layers):
            lengths.append(context + recent)
            kept = int(context * self.prompt.of(layer, num_layers))
            if layer % self.interval == 0 and kept > self.min_context:
                context = kept
        return lengths

    def kept_of_period(self, num_layers: int) -> list[int]:
        """How many of ``period`` generated tokens each layer keeps."""
        most = self.period * self.share
        return [max(1, int(most * self.generated.of(at, num_layers))) for at in range(num_layers)]

    def start(self, num_prompt: IntArray) -> IntArray:
        return num_prompt - self.recent(num_prompt)

    def next_event(self, rows: RowState) -> IntArray:
        later = rows.first_uncompressed_pos + self.recent(rows.num_prompt) + self.period
        return np.where(self._to_be_pruned(rows), rows.num_prompt, later)

    def log_from(self, rows: RowState, next_event: IntArray) -> IntArray:
        """A prompt's own event needs no logged queries: the forward that it is part of has them."""
        logged = np.where(self._to_be_pruned(rows), rows.num_prompt + self.period, next_event)
        return np.asarray(np.maximum(logged - self.recent(rows.num_prompt), 0))

    def plan(self, rows: RowState) -> EvictionSpec:
        recent, in_prompt = self.recent(rows.num_prompt), rows.num_computed == rows.num_prompt
        dropped = self.period - int(self.period * self.share)
        taken = np.where(in_prompt, 0, self.period)
        plan = whole_row(rows, np.zeros_like(rows.kv_len), rows.kv_len - dropped, recent)
        return replace(plan, first_uncompressed_pos=rows.first_uncompressed_pos + taken)

    def _to_be_pruned(self, rows: RowState) -> IntArray:
        pending = rows.num_computed < rows.num_prompt
        return np.asarray(pending & self.prunes(rows.num_prompt))
