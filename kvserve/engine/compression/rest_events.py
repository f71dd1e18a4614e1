"""Events whose dropped entries go to the row's rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.cache.rest_rows import RestRows
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.device_events import EvenEvents
from kvserve.engine.compression.event_parts import EventParts
from kvserve.engine.compression.observer import Windows, slots_of
from kvserve.engine.device.transfer import to_device
from kvserve.engine.policies.base import Policy
from kvserve.scheduler.arrays import ragged_arange
from kvserve.scheduler.messages.event import Events


class RestEvents(EvenEvents):
    """As even events. All that a step's events of a policy drop is read before anything is written:
    the blocks of the rest may be those that such an event gives back."""

    def __init__(self, parts: EventParts, compressor: Compressor) -> None:
        super().__init__(parts, compressor)
        self._layout = parts.cache.layout
        self._rest = next(group for group in parts.batch.groups if isinstance(group, RestRows))

    def apply(self, events: Events, policy: Policy, found: Mapping[int, Any]) -> None:
        read: list[tuple[Tensor, Tensor, Tensor, list[Tensor]]] = []

        def keep_rest(part: Events, windows: Windows, places: Tensor) -> None:
            read.append(self._read(part, windows, places))

        self._compressor.run(events, policy, *self._tables, on_kept=keep_rest)
        for dropped in read:
            self._rest.append(*dropped)

    def _read(
        self, events: Events, windows: Windows, places: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
        """What is not among the kept ``places [E', L, Hkv, N]`` of windows of equal-shaped events:
        slots of the rest int64 [S], and what ``RestRows.read`` says of the entries."""
        dropped = torch.ones(
            *places.shape[:-1], windows.length, dtype=torch.bool, device=places.device
        ).scatter_(-1, places, False)
        count = windows.length - places.shape[-1]
        at = dropped.byte().argsort(dim=-1, descending=True, stable=True)[..., :count]
        at = at + to_device(windows.entries, at.device)[..., None]
        layout = self._layout
        assert events.rest is not None
        lanes = layout.num_layers, layout.num_kv_heads
        slots = slots_of(self._tables[0], windows.rows, at, lanes, layout.block_size)
        entries = self._rest.read(slots)
        size, plan = self._rest.spec.block_tokens, events.plan
        event = np.repeat(np.arange(len(events.rows)), plan.windows)
        first = events.rest.before[event] + ragged_arange(plan.windows) * count
        place = first[:, None] + np.arange(count)
        column = place // size - (events.rest.before // size)[event, None]
        block = events.rest.blocks[event[:, None], column]
        return to_device((block * size + place % size).ravel(), slots.device), *entries
