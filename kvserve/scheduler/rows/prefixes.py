"""What sequences take from the prefix cache, and what they give to it."""

from __future__ import annotations

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.column_hash import column_hashes
from kvserve.scheduler.messages.sequence import Sequence
from kvserve.scheduler.rows.row_table import RowTable


class Prefixes:
    """Moves columns that no event has changed between rows and the prefix cache."""

    def __init__(self, rows: RowTable, blocks: BlockManager) -> None:
        self._rows = rows
        self._blocks = blocks
        self._size = blocks.layout.block_size

    def cached(self, seq: Sequence, limit: int) -> IntArray:
        """Cached columns ``[n, LG, R]`` of at most the first ``limit`` tokens of a sequence."""
        hashes = self.hashes(seq, seq.token_ids, seq.column_hashes)
        return self._blocks.match(hashes[: max(limit, 0) // self._size])

    def hashes(self, seq: Sequence, token_ids: IntArray, known: list[bytes]) -> list[bytes]:
        """Hashes of the columns of ``token_ids``, with which ``seq`` begins; some are ``known``."""
        seq.column_hashes = column_hashes(token_ids, self._size, known, seq.cache_seed)
        return seq.column_hashes

    def publish_chunk(self, row: int, length: int) -> None:
        """Cache the prompt columns that a chunk completes, for sequences admitted after it.

        These may read them in the same step: a layer stores all its new entries before it attends.
        """
        seq = self._rows.owner(row)
        end = int(self._rows.num_computed[row]) + length
        self.publish(seq, min(end, seq.num_prompt_tokens))

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Cache the full columns of a row's first ``num_tokens`` that no event has changed."""
        rows, row, size = self._rows, seq.row, self._size
        first = int(rows.num_published[row])
        end = min(num_tokens, int(rows.num_unmodified_tokens[row])) // size
        if end > first:
            tokens = rows.token_ids[row, : end * size]
            hashes = self.hashes(seq, tokens, seq.column_hashes[:end])
            self._blocks.publish(row, first, hashes[first:end])
            rows.num_published[row] = end
