"""The kinds of compression events, and the device's answer for each kind."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvserve.scheduler.arrays import IntArray


class EventKind(enum.Enum):
    """What decides how much an event keeps, and in which form: ``compression/handlers.py`` says
    what each does to lengths and blocks, the engine's ``event_runner.py`` what to entries.

    ``EVEN``: its trigger alone, equally many in all lanes. ``UNEVEN``: its scores, by layer or by
    head. ``BLOCKS``: as uneven, but whole blocks stay where they are. ``CODED``: as uneven, and
    what is kept becomes codes. ``PRUNED``: a prompt's own event is part of its forward, and how
    much each layer keeps follows from the prompt's length; later ones are uneven.
    """

    EVEN = "even"
    UNEVEN = "uneven"
    BLOCKS = "blocks"
    CODED = "coded"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class KeptCounts:
    """Entries that E events keep of each lane's scored region: ``counts [LG, E, R]``."""

    counts: IntArray


@dataclass(frozen=True, slots=True)
class KeptColumns:
    """Blocks that E events keep: ``columns [LG, E, R, K]`` of their tables, -1 behind the last."""

    columns: IntArray


@dataclass(frozen=True, slots=True)
class CodeCounts:
    """``entries`` kept (or coded in addition) and the ``vectors`` they need, both [LG, E, R]."""

    entries: IntArray
    vectors: IntArray


Scores = KeptCounts | KeptColumns | CodeCounts
"""What the device answers to an ``ObservationTask``."""


def answer(kind: EventKind, kept: IntArray) -> Scores:
    """Make the answer of events of a ``kind`` from the one array that the device sends.

    ``kept [LG, E, R]``; the last axis has the columns of ``BLOCKS``, or entries and vectors of
    ``CODED``.
    """
    if kind is EventKind.BLOCKS:
        return KeptColumns(kept)
    if kind is EventKind.CODED:
        return CodeCounts(kept[..., 0], kept[..., 1])
    return KeptCounts(kept)
