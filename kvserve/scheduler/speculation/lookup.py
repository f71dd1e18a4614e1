"""Guesses that are looked up in a sequence's own tokens (``method: ngram``)."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_manager import BlockManager
from kvserve.scheduler.messages.drafts import Drafts
from kvserve.scheduler.rows.row_table import RowTable
from kvserve.scheduler.speculation.drafter import Drafter
from kvserve.scheduler.speculation.ngram_index import NgramSettings
from kvserve.scheduler.speculation.speculation import Speculation


class Lookup(Speculation):
    """Asks each row's ``Drafter``."""

    def __init__(
        self, rows: RowTable, blocks: BlockManager, settings: NgramSettings, max_tokens: int
    ) -> None:
        super().__init__(rows, blocks, settings.num_tokens, max_tokens)
        self._settings = settings

    def _propose(self, at: IntArray, most: IntArray, least: float) -> Drafts | None:
        """Guesses hold blocks for one step, so it does not matter who waits for some."""
        rows, left = self._rows, self._left
        guesses, expected = dict[int, list[int]](), 0.0
        for row, most_of_row in zip(at.tolist(), most.tolist(), strict=True):
            if not left:
                break
            drafter: Any = self._drafter(row)
            known = rows.token_ids[row, : rows.num_tokens[row]]
            guess = drafter.draft(known, min(most_of_row, left), least, rows.num_decoding)
            rows.guess_from[row] = drafter.ask_at
            if guess:
                guesses[row], left = guess, left - len(guess)
                expected += drafter.expected(len(guess))
        each = list(guesses.values())
        if not each or not self._gains(expected, sum(map(len, each))):
            return None
        return self._drafts(np.fromiter(guesses, np.int32, len(guesses)), each)

    def _new_drafter(self) -> Drafter:
        return Drafter(self._settings, self._chance)
