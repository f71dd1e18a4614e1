"""What a policy demands of its engine: what engines read of one, beside scores and choices."""

from __future__ import annotations

from dataclasses import dataclass

from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.trigger import EventKind


@dataclass(frozen=True, slots=True)
class Demands:
    """``Policy`` has each of them as a property or a class variable, with what it means; a policy
    overrides these, an engine reads the record, which is made once."""

    event_kind: EventKind
    """What decides how much its events keep."""
    granularity: Granularity
    """Where its events leave lengths that differ."""
    cuts_again: bool
    query_reduction: str | None
    """``group_mean`` or ``heads``: how logged queries are reduced; ``None``: none are logged."""
    logged_dtype: str
    """How queries are logged: model, fp8, int4, or auto (the engine's choice)."""
    recomputed_reduction: str | None
    """As ``query_reduction``, if queries are recomputed at the event."""
    reads_values: bool
    uses_centres: bool
    scores_levels: bool
    statistics_file: str | None
    kept_scores: int
    """Scores per head that are kept for the next event."""
    rest_bits: float
    """In how many bits stays what its events do not keep; 0: they drop it."""
    leaves: str
    """What stands for dropped entries: off, mean or fitted."""
    expects_turns: bool
    couples_heads: bool
    couples_layers: bool
    later_entries: int
