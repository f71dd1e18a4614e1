"""Places for remainders of rows that are away: moves follow rows, and no place has two owners."""

from __future__ import annotations

from kvserve.scheduler.blocks.remainder_places import NOTHING, RemainderPlaces


def moves(places: RemainderPlaces) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    saves, loads = places.take()
    return tuple(  # type: ignore[return-value]
        list(zip(each.source.tolist(), each.to.tolist(), strict=True)) for each in (saves, loads)
    )


def test_moves_follow_rows_that_are_exchanged() -> None:
    places = RemainderPlaces(4, 4)
    place = places.save(1)
    places.swap(1, 3)
    places.swap(3, 2)
    assert moves(places) == ([(2, place)], [])
    places.load(place, 0)
    places.swap(0, 1)
    places.load(NOTHING, 3)
    assert moves(places) == ([], [(place, 1)])
    places.check_integrity([place])


def test_a_place_that_is_read_is_not_written_in_the_same_step() -> None:
    places = RemainderPlaces(1, 1)
    place = places.save(0)
    moves(places)
    places.load(place, 0)
    places.release(place)
    assert not places.have_free(preempted=True)
    assert moves(places) == ([], [(place, 0)])
    assert places.have_free(preempted=True) and places.save(0) == place


def test_what_is_saved_in_vain_is_not_moved() -> None:
    """A place that is given back before the step may be taken again: it is written once."""
    places = RemainderPlaces(2, 1)
    place = places.save(0)
    places.release(place)
    assert places.save(1) == place
    assert moves(places) == ([(1, place)], [])
    places.check_integrity([place])


def test_some_places_are_kept_for_preempted_rows() -> None:
    places = RemainderPlaces(2, 3)
    assert places.have_free(preempted=False)
    places.save(0)
    assert not places.have_free(preempted=False) and places.have_free(preempted=True)
