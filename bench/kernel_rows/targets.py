"""Targets for the kernels on a GPU, and the worst measured case of each."""

from __future__ import annotations

from typing import Any

SHAPES = ("llama-8b", "qwen3-4b")
EVENT = ("gather", "gather queries", "window scores", "select", "compact")


def targets(rows: list[dict[str, Any]], period: int) -> list[dict[str, Any]]:
    """Each target with its worst row; ``met`` is ``None`` if nothing was measured.

    A sequence has an event every ``period`` decode steps.
    """
    rows = [row for row in rows if row["shape"] in SHAPES]
    return [
        _target("decode, share of a copy's bandwidth", 0.85, _shares(rows, "decode")),
        _target("compaction, share of a copy's bandwidth", 0.85, _shares(rows, "compact")),
        _target("decode, of the fastest peer's speed", 0.9, _of_peers(rows)),
        _target("event, of the decode attention it serves", 0.03, _events(rows, period), most=True),
        _target("sampling and selection, of torch's time", 1.0, _of_torch(rows), most=True),
    ]


def _target(
    what: str, bound: float, found: list[tuple[float, str]], most: bool = False
) -> dict[str, Any]:
    if not found:
        return {"target": what, "bound": bound, "worst": None, "at": None, "met": None}
    worst, at = max(found) if most else min(found)
    met = worst <= bound if most else worst >= bound
    return {"target": what, "bound": bound, "worst": worst, "at": at, "met": met}


def _place(row: dict[str, Any]) -> str:
    return f"{row['shape']} {row['layout']} {row['context']}"


def _shares(rows: list[dict[str, Any]], kernel: str) -> list[tuple[float, str]]:
    return [(row["of_copy"], _place(row)) for row in rows if row["kernel"] == kernel]


def _by_place(rows: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    places: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        places.setdefault(_place(row), {})[row["kernel"]] = row
    return places


def _of_peers(rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    found = []
    for at, kernels in _by_place(rows).items():
        peers = [row["us"] for name, row in kernels.items() if name.startswith("decode by ")]
        if peers and "decode" in kernels:
            found.append((min(peers) / kernels["decode"]["us"], at))
    return found


def _of_torch(rows: list[dict[str, Any]]) -> list[tuple[float, str]]:
    """Our time over torch's: unless a kernel is faster, we do not need it."""
    return [
        (kernels[name]["us"] / kernels[f"{name} by torch"]["us"], f"{name} {at}")
        for at, kernels in _by_place(rows).items()
        for name in kernels
        if f"{name} by torch" in kernels
    ]


def _events(rows: list[dict[str, Any]], period: int) -> list[tuple[float, str]]:
    """An event of every row over a period's decode attention; over a whole model it is less."""
    found = []
    for at, kernels in _by_place(rows).items():
        if {"decode", *EVENT} <= kernels.keys():
            event = sum(kernels[name]["us"] / kernels[name]["layers"] for name in EVENT)
            found.append((event / (kernels["decode"]["us"] * period), at))
    return found
