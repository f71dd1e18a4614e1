"""The group of the newest tokens' entries as they were computed, beside entries in few bits."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.block_table import BlockTable
from kvserve.scheduler.blocks.window_group import WindowGroup, WindowSpec
from kvserve.scheduler.layout import KVLayout


class NewestGroup(WindowGroup):
    """Entries from a row's last multiple of ``window`` tokens on, addressed by logical position.

    Which entries a token reads so must not depend on what other sequences have computed. Therefore
    a cached prefix ends at such a multiple: a token behind it needs none from before it.
    """

    kind = "newest"
    cached_with_prefixes = False

    def __init__(self, table: BlockTable, spec: WindowSpec) -> None:
        super().__init__(table, spec)
        self.prefix_tokens = spec.window

    def begin_at(self, row: int, position: int) -> None:
        self._table.start(row, position // self.block_tokens)

    def resumes_from(self, row: int) -> int:
        first = int(self._table.first[0, row, 0]) * self.block_tokens
        return -(-first // self._window) * self._window

    def _first_column(self, positions: IntArray) -> IntArray:
        first: IntArray = positions // self._window * self._window // self.block_tokens
        return first


@dataclass(frozen=True)
class NewestSpec(WindowSpec):
    """Of all layers: those of the layout, then ``num_layers`` with sliding windows, in tables of
    their own. ``window`` is a multiple of the layout's block size."""

    makes = NewestGroup

    @property
    def slack(self) -> int:
        return 16

    def lanes(self, layout: KVLayout) -> tuple[int, int]:
        windowed, rows = super().lanes(layout)
        return layout.layer_groups * layout.holds_entries + windowed, rows
