"""Rows of a size that no length changes: what layers with states keep of all that a row has read.

Beside the pool, each row at the place of its number, and behind the rows those that later prompts
may begin with (``kept_states.py``): there are no blocks, and no tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec
from kvserve.scheduler.blocks.kept_states import KeptStates
from kvserve.scheduler.layout import KVLayout, LayerState
from kvserve.scheduler.messages.output import TableUpdate
from kvserve.scheduler.messages.saved_row import GroupRow, SavedTable
from kvserve.scheduler.row_schema import per_row

BOUNDARY = 64
"""States are kept at multiples of so many tokens: chunks that end there give the numbers of longer
ones, where modules compute in pieces as long."""


class StateGroup(CacheGroup):
    """A row that leaves for host memory takes as many blocks there as its state fills. ``shared``:
    how many tokens a row's prompt had in common with earlier ones."""

    kind = "states"
    prefix_tokens = BOUNDARY
    shared: IntArray = per_row()

    def __init__(self, spec: StateSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kept: KeptStates | None = None
        """``None``: prefixes are not cached."""
        self.make_by_row(lambda fields: np.zeros((fields, spec.max_rows), np.int32))

    def start_row(self, row: int) -> None:
        self.shared[row] = 0

    def save(self, row: int) -> GroupRow:
        """The null block stands for what is in no block as long as the row is in the pool."""
        columns = np.zeros((1, 1), np.int32)
        there = SavedTable(columns, columns, np.zeros(self.spec.host_blocks, np.int32))
        return GroupRow((there,), {})

    def take_updates(self, num_rows: int) -> list[TableUpdate]:
        """None; a step's moves are taken by now."""
        if self.kept is not None:
            self.kept.step_ends()
        return []

    def blocks_of_rows(self, num_rows: int) -> IntArray:
        return np.zeros(num_rows, np.int32)

    def counts(self, rows: Rows) -> dict[str, int]:
        return {"state_bytes": self.spec.all_bytes * len(np.arange(self.spec.max_rows)[rows])}

    def check_integrity(self) -> None:
        if self.kept is not None:
            self.kept.check_integrity()


@dataclass(frozen=True)
class StateSpec(GroupSpec):
    """Of ``max_rows`` rows and ``num_kept`` places of kept ones; ``row_bytes`` are those of one in
    all ``layers`` on each of the ``ranks``, and fill ``host_blocks`` in host memory. States are
    kept at every multiple of ``every`` tokens, among others."""

    rows = "kvserve.engine.cache.state_rows"
    layers: tuple[LayerState, ...]
    row_bytes: int
    max_rows: int
    num_kept: int = 0
    every: int = BOUNDARY
    host_blocks: int = 1
    ranks: int = 1

    @property
    def all_bytes(self) -> int:
        """Of a row on all ranks."""
        return self.row_bytes * self.ranks

    @property
    def nbytes(self) -> int:
        """Of all rows and places, on one rank."""
        return self.row_bytes * (self.max_rows + self.num_kept)

    @property
    def shown(self) -> tuple[tuple[str, str, str], str]:
        rows, kept, each = self.max_rows, self.num_kept, self.row_bytes / 2**20
        state = f"{len(self.layers)} layers, {each:.3f} MiB a sequence, {rows * each:.1f} MiB"
        why = "on each rank, " * (self.ranks > 1) + f"beside the pool, for {rows}: --max-num-seqs"
        if not kept:
            return ("states", state, why), "--enable-prefix-caching, with memory for kept states"
        because = (
            f"prompts begin where a state is kept: at the last {BOUNDARY} tokens of a prompt, "
            f"where prompts part, and every {self.every} tokens; --enable-prefix-caching"
        )
        state += f" and {kept * each:.1f} MiB kept for later prompts"
        return ("states", state, why), because

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CacheGroup:
        assert max_rows == self.max_rows
        return StateGroup(self)
