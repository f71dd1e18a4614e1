"""The fields of a row, declared once: arrays are made, moved, begun and parked by them.

Host and device declare their fields alike (``RowTable``, ``BlockManager``, ``CodeTables`` and the
engine's ``InputBatch``). The code here serves numpy and torch arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class RowField:
    """An array with a place for each row: ``[rows]``, or ``[LG, rows, R, ...]`` if ``by_group``.

    ``new`` names the attribute of a new row's record that the row begins with. If ``new`` is empty,
    the row begins with 0; if it is ``None``, the old number stays.
    """

    by_group: bool
    new: str | None


def per_row(new: str | None = "") -> Any:
    """A field ``[rows]``."""
    return RowField(False, new)


def per_group(new: str | None = "") -> Any:
    """A field ``[LG, rows, R, ...]``."""
    return RowField(True, new)


class RowArrays:
    """Subclasses annotate their arrays and give each a ``per_row`` or ``per_group``.

    ``fields`` maps names to these. Fields by row are the lines of one array, so that a move is one
    operation.
    """

    fields: ClassVar[dict[str, RowField]] = {}
    _by_row: Any = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        own = {name: x for name, x in vars(cls).items() if isinstance(x, RowField)}
        cls.fields = {**cls.fields, **own}

    def make_by_row(self, zeros: Callable[[int], Any]) -> None:
        """Make the fields by row: lines of ``zeros(n)``, an array ``[n, rows]``."""
        names = [name for name, field in self.fields.items() if not field.by_group]
        self._by_row = zeros(len(names))
        for number, name in enumerate(names):
            setattr(self, name, self._by_row[number])

    def make_by_group(self, zeros: Callable[[], Any]) -> None:
        """Make the fields by group that are not there yet: each a ``zeros()`` of its own."""
        for name, field in self.fields.items():
            if field.by_group and name not in vars(self):
                setattr(self, name, zeros())

    def move_rows(self, to: Any, source: Any) -> None:
        """Put the rows ``source`` in the place of the rows ``to``, all at once."""
        if len(self._by_row):
            self._by_row[:, to] = self._by_row[:, source]
        for name, field in self.fields.items():
            if field.by_group:
                array = getattr(self, name)
                array[:, to] = array[:, source]

    def begin_rows(self, rows: Any, record: object, convert: Callable[[Any], Any]) -> None:
        """Begin rows with the values of ``record``, ``convert``-ed to arrays of this side.

        Arrays of a record are ``[n]`` or ``[LG, n, R]`` for ``rows [n]``.
        """
        for name, field in self.fields.items():
            if field.new is not None:
                value = convert(attrgetter(field.new)(record) if field.new else 0)
                array = getattr(self, name)
                array[(slice(None), rows) if field.by_group else rows] = value

    def park_row(self, row: int) -> dict[str, Any]:
        """A copy of all that belongs to a row, by field."""
        return {
            name: getattr(self, name)[(slice(None), row) if field.by_group else row].copy()
            for name, field in self.fields.items()
        }

    def restore_fields(self, row: int, parked: dict[str, Any]) -> None:
        """Write what ``park_row`` has returned to another row."""
        for name, value in parked.items():
            at = (slice(None), row) if self.fields[name].by_group else row
            getattr(self, name)[at] = value
