"""Codebook storage: which entries of a row are held as codes, and in which blocks.

A coded lane (one KV group of a row) holds its first entries as slots in *index blocks*, which refer
to vectors in *vector blocks*; both come from the same pool as all other blocks. Later entries are
in raw blocks, as usual, with which the lane's KV table then begins.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import BlockTable, Rows
from kvserve.scheduler.blocks.cache_group import CacheGroup, GroupSpec
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import CodeBlocks
from kvserve.scheduler.row_schema import per_group

SLOT_BYTES = 16
"""Two references, two scales, a position and a distance; four are not used."""
MAX_VECTORS = 1 << 16
"""References have two bytes."""


@dataclass(frozen=True, slots=True)
class Coding:
    """What a row holds after one event; all ``[LG, R]``.

    Of ``kv_lens`` entries the first ``coded`` are held as codes, with ``num_vectors`` vectors. With
    ``afresh`` the whole row is written again; otherwise its raw entries stay where they are.
    """

    kv_lens: IntArray
    coded: IntArray
    num_vectors: IntArray
    afresh: bool


class CodeGroup(CacheGroup):
    """Index and vector tables of all rows; ``coded`` entries and ``num_vectors`` of each lane.

    Both ``[LG, max_rows, R]``. ``slots_per_block`` slots fit an index block.
    """

    coded: IntArray = per_group()
    num_vectors: IntArray = per_group()

    def __init__(
        self,
        pool: BlockPool,
        layout: KVLayout,
        max_rows: int,
        max_model_len: int,
        slots_per_block: int,
    ) -> None:
        self.slots_per_block = slots_per_block
        self.vectors_per_block = 2 * layout.block_size
        self._size = layout.block_size
        lanes = layout.layer_groups, layout.rows
        self.index = BlockTable(pool, lanes, max_rows, slots_per_block, max_model_len)
        self.vectors = BlockTable(pool, lanes, max_rows, self.vectors_per_block, 2 * max_model_len)
        super().__init__(self.index, self.vectors)
        self.make_by_group(lambda: np.zeros_like(self.index.end))

    def start_row(self, row: int) -> None:
        super().start_row(row)
        self.coded[:, row] = self.num_vectors[:, row] = 0

    def can_leave(self, row: int) -> bool:
        """The device keeps no counts of codes for rows that are away, so only raw ones leave."""
        return not self.coded[:, row].any()

    def counts(self, rows: Rows) -> dict[str, int]:
        coded, vectors = self.coded[:, rows].sum(), self.num_vectors[:, rows].sum()
        return {"coded_entries": int(coded), "codebook_entries": int(vectors)}

    def code(
        self, blocks: BlockManager, rows: IntArray, codings: IntArray
    ) -> tuple[IntArray, CodeBlocks | None]:
        """Change rows to what ``codings`` say, in order, until one finds no blocks.

        Returns how many blocks each gives back (0 if it takes more), and where to write codes.
        """
        before = self.coded[:, rows].copy(), self.num_vectors[:, rows].copy()
        kv, size, released = blocks.kv, self._size, list[int]()
        for row, coding in zip(rows.tolist(), codings, strict=True):
            at, first = np.array([row]), coding.coded // size
            # Blocks that the event takes before it gives any back, and those that it gives back.
            wanted = self.index.wanted(at, coding.coded[:, None])
            wanted += self.vectors.wanted(at, coding.num_vectors[:, None])
            if coding.afresh:
                wanted += int((-(-coding.kv_lens // size) - first).sum())
                named, _ = kv.row_entries(row)
                own = int(np.count_nonzero(blocks.pool.ref[named] == 1))
                if not blocks.have_free(wanted - own, for_event=True):
                    blocks.forget(named)
                    own = int(np.count_nonzero(blocks.pool.ref[named] == 1))
            else:  # generated entries, whose blocks are not shared
                own = int(((coding.coded - self.coded[:, row]) // size).sum())
            if not blocks.have_free(wanted - own, for_event=True):
                break
            held = int(blocks.held(row + 1)[row])
            if coding.afresh:
                kv.truncate(at, np.zeros_like(first)[:, None])
            kv.move_front(at, first[:, None])
            kv.extend(at, coding.kv_lens[:, None])
            self.index.extend(at, coding.coded[:, None])
            self.vectors.extend(at, coding.num_vectors[:, None])
            self.coded[:, row], self.num_vectors[:, row] = coding.coded, coding.num_vectors
            blocks.kv_lens[:, row] = coding.kv_lens
            released.append(max(held - int(blocks.held(row + 1)[row]), 0))
        done = len(released)
        if not done:
            return np.zeros(0, np.int32), None
        rows, (coded, vectors) = rows[:done], (numbers[:, :done] for numbers in before)
        index_blocks, vector_blocks = (
            table.blocks[:, rows, :, : table.end[:, rows].max(initial=0)].copy()
            for table in (self.index, self.vectors)
        )
        now = self.coded[:, rows], self.num_vectors[:, rows]
        codes = CodeBlocks(coded, now[0], vectors, now[1], index_blocks, vector_blocks)
        return np.array(released, np.int32), codes


@dataclass(frozen=True)
class CodeSpec(GroupSpec):
    """Codes: ``block_tokens`` slots fit an index block."""

    def make(
        self, pool: BlockPool, layout: KVLayout, max_rows: int, max_model_len: int
    ) -> CodeGroup:
        return CodeGroup(pool, layout, max_rows, max_model_len, self.block_tokens)
