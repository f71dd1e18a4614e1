"""Which positions each layer and KV head of one sequence holds, followed from plan to plan."""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray


class LanePositions:
    """``lanes[layer][head]`` are positions in the order of the cache, of ``seen`` tokens so far."""

    def __init__(self, layers: int, heads: int) -> None:
        self.lanes = [[np.zeros(0, np.int32) for _ in range(heads)] for _ in range(layers)]
        self.seen = 0

    def see(self, seen: int) -> None:
        """Append the tokens up to ``seen`` to every lane."""
        new = np.arange(self.seen, seen, dtype=np.int32)
        self.lanes = [[np.concatenate([lane, new]) for lane in row] for row in self.lanes]
        self.seen = seen

    def see_longest(self, length: int) -> None:
        """Append tokens until the longest lane is ``length`` long."""
        self.see(self.seen + length - max(len(lane) for row in self.lanes for lane in row))

    def move(self, start: int, source: IntArray, counts: IntArray) -> None:
        """Follow one event of a ``MovePlan``: ``source [L, Hkv, P]``, ``counts [L, Hkv]``."""
        self.lanes = [
            [
                np.concatenate([lane[:start], lane[source[layer, head, : counts[layer, head]]]])
                for head, lane in enumerate(row)
            ]
            for layer, row in enumerate(self.lanes)
        ]

    def padded(self) -> IntArray:
        """The positions as [L, Hkv, n]; shorter lanes are padded with -1."""
        longest = max(len(lane) for row in self.lanes for lane in row)
        padded = np.full((len(self.lanes), len(self.lanes[0]), longest), -1, np.int32)
        for layer, row in enumerate(self.lanes):
            for head, lane in enumerate(row):
                padded[layer, head, : len(lane)] = lane
        return padded
