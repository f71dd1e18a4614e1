"""Places for remainders of rows that are away: moves follow rows, and no place has two owners."""

from __future__ import annotations

from kvserve.scheduler.blocks.swap_memory import SwapMemory

Pairs = list[tuple[int, int]]


def moves(memory: SwapMemory) -> tuple[Pairs, Pairs]:
    """Rows and places, out and in."""
    taken = memory.take_moves()
    assert taken is not None and memory.take_moves() is None
    outs, ins = ([(m.row, m.remainder) for m in each] for each in (taken.outs, taken.ins))
    return outs, ins


def test_what_is_saved_in_vain_is_not_moved() -> None:
    """A place that is given back before the step may be taken again: it is written once."""
    memory = SwapMemory(2, 1)
    place = memory.save_remainder(0)
    memory.release_place(place)
    assert memory.save_remainder(1) == place
    assert moves(memory) == ([(1, place)], [])
    memory.check_integrity([], [place])


def test_some_places_are_kept_for_preempted_rows() -> None:
    memory = SwapMemory(2, 3)
    assert memory.have_place(preempted=False)
    memory.save_remainder(0)
    assert not memory.have_place(preempted=False) and memory.have_place(preempted=True)
