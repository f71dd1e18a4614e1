"""Which blocks and how many entries each row holds: keys and values, and logged queries.

A row has two lengths: the logical position (``positions`` arguments) addresses the query log, the
physical length ``kv_lens`` addresses keys and values. ``rows`` arguments are arrays.
"""

from __future__ import annotations

import numpy as np

from kvserve.scheduler.arrays import IntArray, ragged_arange
from kvserve.scheduler.blocks.block_pool import BlockPool
from kvserve.scheduler.blocks.block_table import NO_UPDATE, BlockTable, Rows
from kvserve.scheduler.blocks.code_tables import CodeTables, Coding
from kvserve.scheduler.blocks.idle_blocks import IdleBlocks, SavedRows
from kvserve.scheduler.blocks.prefix_cache import PrefixCache
from kvserve.scheduler.blocks.remainder_places import RemainderPlaces
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import CodeBlocks, TableUpdate
from kvserve.scheduler.row_schema import RowArrays, per_group, per_row
from kvserve.scheduler.triggers.trigger import NOT_LOGGING


class BlockManager(RowArrays):
    """Block tables over one pool; rows hold ``kv_lens [LG, max_rows, R]`` entries.

    ``code_slots`` slots fit an index block (0: entries are never coded). With ``code_scratch``
    codes are rebuilt in blocks of the pool before a layer attends.
    """

    kv_lens: IntArray = per_group()
    _log_from: IntArray = per_row()

    def __init__(
        self,
        layout: KVLayout,
        pool: BlockPool,
        max_rows: int,
        max_model_len: int,
        log_block_tokens: int,
        prefix_cache: PrefixCache | None = None,
        continuations: SavedRows | None = None,
        code_slots: int = 0,
        code_scratch: bool = True,
        remainders: RemainderPlaces | None = None,
    ) -> None:
        self.remainders = remainders or RemainderPlaces(max_rows, 0)
        self.layout = layout
        self.pool = pool
        self.idle = IdleBlocks(pool, prefix_cache, continuations)
        self.log_block_tokens = log_block_tokens
        self.kv = BlockTable(pool, layout, max_rows, layout.block_size, max_model_len)
        self.log = BlockTable(pool, layout, max_rows, log_block_tokens, max_model_len)
        self.make_by_group(lambda: np.zeros((layout.layer_groups, max_rows, layout.rows), np.int32))
        self.make_by_row(lambda fields: np.full((fields, max_rows), NOT_LOGGING, np.int32))
        self.codes: CodeTables | None = None
        if code_slots:
            self.codes = CodeTables(
                pool, layout, max_rows, max_model_len, code_slots, scratch=code_scratch
            )

    def start_row(self, row: int) -> None:
        """Begin an empty row that logs no queries."""
        self.kv.start(row, 0)
        self.log.start(row, 0)
        if self.codes is not None:
            self.codes.start_row(row)
        self.kv_lens[:, row] = 0
        self._log_from[row] = NOT_LOGGING

    def wanted(self, rows: Rows, new: IntArray, positions: IntArray) -> int:
        """Blocks still missing for ``new`` more tokens per row, from logical ``positions`` on."""
        wanted = self.kv.wanted(rows, self.kv_lens[:, rows] + new[:, None])
        logged = self._logged(rows, positions + new)
        return wanted + self.log.wanted(rows, logged) if logged.any() else wanted

    def grow(self, rows: Rows, new: IntArray, positions: IntArray) -> None:
        """Allocate the blocks that ``wanted`` counts."""
        self.kv.extend(rows, self.kv_lens[:, rows] + new[:, None])
        logged = self._logged(rows, positions + new)
        if logged.any():
            self.log.extend(rows, logged)

    def advance(self, rows: IntArray, new: IntArray) -> None:
        """Count ``new`` stored entries per row."""
        self.kv_lens[:, rows] += new[:, None]

    def advance_first(self, num_rows: int) -> None:
        """Count one more entry in each of the first rows, which decode."""
        self.kv_lens[:, :num_rows] += 1

    def make_private(self, rows: IntArray, start: IntArray, end: IntArray) -> IntArray:
        """Make entries ``[start [n], end [LG, n, R])`` writable; shared blocks are replaced.

        Returns where the copy of each row must begin: ``start``, or the beginning of the first
        replaced column (its earlier entries move along).
        """
        owner, column, end_columns = self._columns_of(start, end)
        replaced = self.kv.replace_shared(rows[owner], column, end_columns)
        copy_start = start.copy()
        np.minimum.at(copy_start, owner[replaced], column[replaced] * self.layout.block_size)
        return copy_start

    def written(self, rows: IntArray, copy_start: IntArray, end: IntArray) -> IntArray:
        """Blocks of entries ``[copy_start [n], end [LG, n, R])``: ``[LG, n, R, .]``, padded."""
        size = self.layout.block_size
        first = copy_start // size
        width = int((-(-end.max(axis=(0, 2)) // size) - first).max())
        columns = np.minimum(first[:, None] + np.arange(width), self.kv.blocks.shape[3] - 1)
        # Advanced axes come first: [n, width, LG, R] -> [LG, n, R, width].
        return self.kv.blocks[:, rows[:, None], :, columns].transpose(2, 0, 3, 1)

    def affordable(self, rows: IntArray, start: IntArray, end: IntArray) -> int:
        """For how many of the rows, in order, ``make_private`` would find its blocks."""
        owner, column, end_columns = self._columns_of(start, end)
        shared = self.kv.shared(rows[owner], column, end_columns)
        if not self.have_free(int(shared.sum()), for_event=True):
            # Blocks that only a row and a cache name are writable once the cache drops them.
            self.idle.forget(self.kv.blocks[:, rows[owner], :, column].ravel())
            shared = self.kv.shared(rows[owner], column, end_columns)
        per_column = shared.sum(axis=(1, 2))
        wanted = np.bincount(owner, weights=per_column, minlength=len(rows)).cumsum()
        return int(np.searchsorted(wanted, self.pool.num_free, side="right"))

    # ---- prefix cache ------------------------------------------------------------------------

    @property
    def prefix_cache(self) -> PrefixCache | None:
        return self.idle.prefixes

    @property
    def num_cached(self) -> int:
        """Blocks that are only held for later sequences; they are evicted when needed."""
        return self.idle.num_blocks

    @property
    def headroom(self) -> int:
        """Blocks that are free, or that eviction can free."""
        return self.pool.num_free + self.num_cached

    def have_free(self, count: int, *, for_event: bool = False) -> bool:
        """Whether ``count`` blocks are free; evicts what is held for later if needed."""
        return count <= self.pool.num_free or self.idle.have_free(count, may_park=not for_event)

    def match(self, hashes: list[bytes]) -> IntArray:
        """Columns ``[n, LG, R]`` of the longest cached prefix."""
        prefixes = self.idle.prefixes
        found = [] if prefixes is None else prefixes.match(hashes)
        shape = (len(found), self.layout.layer_groups, self.layout.rows)
        return np.array(found, np.int32).reshape(shape)

    def adopt(self, row: int, columns: IntArray) -> None:
        """Begin an empty row with the entries of shared ``columns [n, LG, R]``."""
        self.kv.adopt(row, columns)
        self.kv_lens[:, row] = len(columns) * self.layout.block_size

    def publish(self, row: int, first: int, hashes: list[bytes]) -> None:
        """Cache a row's columns from ``first`` on, one per hash, for later prompts."""
        if self.idle.prefixes is not None:
            columns = self.kv.blocks[:, row, :, first : first + len(hashes)]
            self.idle.prefixes.publish(hashes, columns.transpose(2, 0, 1))

    # ---- lengths -----------------------------------------------------------------------------

    def truncate(self, rows: IntArray, kv_lens: IntArray) -> IntArray:
        """Cut rows to ``kv_lens [LG, rows, R]`` entries; return the blocks released, ``[rows]``."""
        self.kv_lens[:, rows] = kv_lens
        return self.kv.truncate(rows, -(-kv_lens // self.layout.block_size))

    def keep_columns(self, row: int, columns: IntArray, kv_lens: IntArray) -> int:
        """Keep only ``columns [LG, R, K]`` of a row (-1 behind the last), ``kv_lens [LG, R]`` long.

        Returns how many blocks it gives back. No entry moves, so shared blocks may stay shared.
        """
        self.kv_lens[:, row] = kv_lens
        return self.kv.keep(row, columns[..., columns[0, 0] >= 0])

    def code(self, rows: IntArray, codings: IntArray) -> tuple[IntArray, CodeBlocks | None]:
        """Change rows to what ``codings`` say, in order, until one finds no blocks.

        Returns how many blocks each gives back (0 if it takes more), and where to write codes.
        """
        assert self.codes is not None
        before = self.codes.coded[:, rows].copy(), self.codes.num_vectors[:, rows].copy()
        released = list[int]()
        for row, coding in zip(rows.tolist(), codings, strict=True):
            if not self._codable(self.codes, row, coding):
                break
            held = int(self.held(row + 1)[row])
            self.codes.book(row, self.kv, coding)
            self.kv_lens[:, row] = coding.kv_lens
            released.append(max(held - int(self.held(row + 1)[row]), 0))
        done = len(released)
        if not done:
            return np.zeros(0, np.int32), None
        coded, vectors = (held[:, :done] for held in before)
        return np.array(released, np.int32), self.codes.blocks_of(rows[:done], (coded, vectors))

    def num_coded(self, row: int) -> tuple[int, int]:
        """Entries that a row's lanes hold as codes, and the vectors of their codebooks."""
        if self.codes is None:
            return 0, 0
        return int(self.codes.coded[:, row].sum()), int(self.codes.num_vectors[:, row].sum())

    def take_code_updates(
        self, num_rows: int, scheduled: IntArray
    ) -> tuple[TableUpdate, TableUpdate, tuple[int, ...]]:
        """Updates of the index and vector tables; entries of scheduled rows to rebuild, by layer.

        The last is empty if there are none.
        """
        if self.codes is None:
            return NO_UPDATE, NO_UPDATE, ()
        index, vectors = self.codes.index, self.codes.vectors
        updates = index.take_update(num_rows), vectors.take_update(num_rows)
        if not self.codes.scratch:
            return *updates, ()
        coded = self.codes.coded[:, scheduled].sum(axis=(1, 2))
        return *updates, tuple(coded.tolist()) if coded.any() else ()

    def log_from(self, rows: IntArray, positions: IntArray) -> None:
        """Log queries from logical ``positions`` on (or NOT_LOGGING); give back earlier ones."""
        if (self._log_from[rows] == positions).all():
            return
        self.log.move_front(rows, positions[:, None] // self.log_block_tokens)
        self._log_from[rows] = positions

    def logged_from(self, rows: list[int]) -> IntArray:
        """Logical positions from which rows log queries."""
        logged: IntArray = self._log_from[rows]
        return logged

    def logs_queries(self, num_rows: int) -> bool:
        """Whether any of the first ``num_rows`` rows logs queries."""
        return bool((self._log_from[:num_rows] < NOT_LOGGING).any())

    def columns_in_use(self, num_rows: int) -> IntArray:
        """Columns in use by each of the first rows, in the longest of its groups."""
        longest: IntArray = self.kv_lens[:, :num_rows].max(axis=0).max(axis=1)
        return -(-longest // self.layout.block_size)

    def release_row(self, row: int) -> None:
        """Give back everything a row holds."""
        if self.codes is not None:
            self.codes.release_row(row)
        self.kv.release_row(row)
        self.log.release_row(row)
        self.start_row(row)

    def give_back_unused(self, row: int, computed: int) -> None:
        """Give back blocks reserved for entries behind the last one held."""
        at, size = np.array([row]), self.log_block_tokens
        self.kv.truncate(at, -(-self.kv_lens[:, at] // self.layout.block_size))
        self.log.truncate(at, np.maximum(-(-computed // size), self.log.first[:, at]))

    def restore_row(
        self,
        row: int,
        lengths: dict[str, IntArray],
        columns: IntArray,
        log_first: int,
        log_end: int,
    ) -> None:
        """Begin an empty row with shared ``columns`` and fresh blocks for the rest it held.

        ``lengths`` are what ``park_row`` has returned.
        """
        at = np.array([row])
        self.start_row(row)
        self.kv.adopt(row, columns)
        self.kv.extend(at, lengths["kv_lens"][:, None])
        self.log.start(row, log_first)
        self.log.extend(at, np.array(log_end * self.log_block_tokens))
        self.restore_fields(row, lengths)

    def held(self, num_rows: int) -> IntArray:
        """Blocks that each of the first ``num_rows`` rows names, logged queries included."""
        held = self.kv.held(num_rows) + self.log.held(num_rows)
        return held if self.codes is None else held + self.codes.held(num_rows)

    def held_by(self, row: int) -> tuple[int, int]:
        """Blocks that a row names for its entries, and for its logged queries."""
        log = int(self.log.held(row + 1)[row])
        return int(self.held(row + 1)[row]) - log, log

    def swap(self, a: int, b: int) -> None:
        """Exchange two rows."""
        self.kv.swap(a, b)
        self.log.swap(a, b)
        if self.codes is not None:
            self.codes.swap(a, b)
        self.remainders.swap(a, b)
        self.move_rows([a, b], [b, a])

    def check_integrity(self) -> None:
        """Reference counts equal the tables and the cache; lengths fit their columns."""
        others = [] if self.prefix_cache is None else [self.prefix_cache.held()]
        if self.idle.continuations is not None:
            self.idle.continuations.check_integrity()
            others.append(self.idle.continuations.held())
        if self.codes is not None:
            others += [self.codes.index.all_held(), self.codes.vectors.all_held()]
        held = np.concatenate([self.kv.all_held(), self.log.all_held(), *others])
        assert (held > 0).all(), "a live table names the null block"
        self.pool.check_integrity(held)
        assert (self.kv_lens <= self.kv.end * self.layout.block_size).all()

    def _codable(self, codes: CodeTables, row: int, coding: Coding) -> bool:
        """Whether a row would find the blocks that ``coding`` takes."""
        wanted = codes.wanted(row, coding)
        if not coding.afresh:
            # It replaces generated entries, whose blocks are not shared.
            return self.have_free(wanted - codes.replaced(row, coding), for_event=True)
        named, _ = self.kv.row_entries(row)
        own = int(np.count_nonzero(self.pool.ref[named] == 1))
        if not self.have_free(wanted - own, for_event=True):
            self.idle.forget(named)
            own = int(np.count_nonzero(self.pool.ref[named] == 1))
        return self.have_free(wanted - own, for_event=True)

    def _columns_of(self, start: IntArray, end: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Columns that hold entries ``[start [n], end [LG, n, R])`` of any group of n rows.

        Returns for each its owner among the n, its number, and the end column of each group of the
        owner, ``[LG, ., R]``.
        """
        first, end_columns = start // self.layout.block_size, -(-end // self.layout.block_size)
        counts = np.maximum(end_columns.max(axis=(0, 2)) - first, 0)
        owner = np.repeat(np.arange(len(start)), counts)
        return owner, np.repeat(first, counts) + ragged_arange(counts), end_columns[:, owner]

    def _logged(self, rows: Rows, ends: IntArray) -> IntArray:
        """Logical positions up to which rows log queries: ``[n, 1]``, 0 for those that do not."""
        return np.where(ends > self._log_from[rows], ends, 0)[:, None]
