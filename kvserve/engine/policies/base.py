"""What every policy offers: its fields are its hyper-parameters, its methods are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor

from kvserve.engine.policies.parts.arguments import (
    PolicyError,
    argument,
    check_arguments,
    counts_tokens,
    exact_ratio,
    field_names,
    require,
)
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.triggers.trigger import EventKind, Trigger

if TYPE_CHECKING:
    from kvserve.engine.policies.scoring import Observation, Remainder

__all__ = [
    "Policy",
    "PolicyError",
    "Selection",
    "argument",
    "exact_ratio",
    "field_names",
    "require",
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept places of E events: the first ``counts [E, L', Hkv]`` of ``indices [E, L', Hkv, K]``.

    int64. The kept indices ascend; those behind them are ignored. Counts are equal over heads if
    the policy's granularity is LAYER.
    """

    indices: Tensor
    counts: Tensor


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
    uses_values: bool
    uses_centres: bool
    scores_levels: bool
    stats: str | None
    kept_scores: int
    """Scores per head that are kept for the next event."""
    rest_bits: float
    """In how many bits stays what its events do not keep; 0: they drop it."""
    leaves: str
    """What stands for dropped entries: off, mean or fitted."""
    protect_turns: bool
    couples_heads: bool
    couples_layers: bool
    later_entries: int


class Policy:
    """Subclass it as a frozen dataclass. Token counts are ints; a ratio is the exact part *kept*.

    A subclass says when its events are due (``event_trigger``) and scores (``score``); all else has
    a default. One that keeps unequal counts names its ``granularity`` and overrides ``choose``.
    """

    # ---- what it is: written down in the class ----

    name: ClassVar[str]
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Other defaults, by the value of a field ``preset``."""
    cost: ClassVar[str] = ""
    """What it takes of memory and time, for ``kvserve policies``."""
    avoid: ClassVar[str] = ""
    """When not to use it."""
    needs: ClassVar[tuple[str, ...]] = ()
    """At least one of these fields is required."""
    granularity: ClassVar[Granularity] = Granularity.MODEL
    """LAYER or HEAD if its events leave layers, or KV heads, with different lengths."""
    keeps_blocks: ClassVar[bool] = False
    """It is uneven and keeps whole blocks (except for the last one), so no entry moves."""
    cuts_again: ClassVar[bool] = False
    """It is uneven, and can have further events on lanes whose lengths already differ."""
    ranks_entries: ClassVar[bool] = False
    """Its scores rank single entries, so AdaKV can share out a budget by them."""
    uses_values: ClassVar[bool] = False
    """It scores by the entries' values too (``Observation.values``)."""
    couples_heads: ClassVar[bool] = False
    """Its counts or choices depend on several KV heads. If so, they cover the heads of all
    tensor-parallel ranks (``Observation.all_heads``), and each rank takes its own."""
    couples_layers: ClassVar[bool] = False
    """Its scores depend on several layers, which are then scored together."""
    uses_centres: ClassVar[bool] = False
    """It scores by where the model's queries usually point, which was measured beforehand."""
    protects: ClassVar[str] = ""
    """The field that counts the newest entries which an event always keeps and does not score."""

    # ---- arguments that many have: what one without them would say ----

    query_reduce: str | None = None
    query_dtype: str = "auto"
    attention: str | None = "window"
    remainder: str | None = "off"
    rest_bits: float = 0.0
    reuse_layers: int | None = 1
    protect_turns: bool = False
    stats: str | None = None
    """The file of where the model's queries point."""

    # ---- whether its arguments can work ----

    def __post_init__(self) -> None:
        check_arguments(self)
        self.check()
        if self.query_dtype == "int4":
            allowed = "another unless query_source is log and query_reduce is heads"
            require(self.query_reduction == "heads", "query_dtype", "int4", allowed)
        if self.attention == "absolute":
            allowed = "window unless queries are logged in 4 bits (query_dtype int4, all heads)"
            logged = self.query_reduction == "heads" and self.logged_dtype == "int4"
            require(logged, "attention", "absolute", allowed)
        if self.rest_bits:
            off, even = self.remainder == "off", self.event_kind is EventKind.REST
            require(off, "remainder", self.remainder, "off with rest_bits, which drops nothing")
            require(self.rest_bits >= 1, "rest_bits", self.rest_bits, "0, or at least 1")
            why = f"0 where events are {self.event_kind.value}"
            require(even, "rest_bits", self.rest_bits, why)

    def check(self) -> None:
        """Raise ``PolicyError`` if arguments that are valid by themselves do not go together."""

    def check_bounds(self, max_model_len: int) -> None:
        """Raise ``PolicyError`` if a given argument exceeds what a server's context holds."""
        allowed = f"at most the context of {max_model_len} tokens"
        for f in fields(cast(Any, self)):
            value = getattr(self, f.name)
            if value not in (None, f.default) and counts_tokens(f):
                require(value <= max_model_len, f.name, value, allowed)

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        """The policy that runs on this model: this one, with fields that depend on it filled in.

        Raises ``PolicyError`` if the policy cannot run on it.
        """
        return self

    @property
    def caution(self) -> str:
        """What the start-up table warns of with this policy on this model; empty if nothing."""
        return ""

    # ---- when it has events, and what the engine has ready for them ----

    @cached_property
    def demands(self) -> Demands:
        """All of these in one record, which is what engines read."""
        return Demands(**{f.name: getattr(self, f.name) for f in fields(Demands)})

    @property
    def event_trigger(self) -> Trigger:
        """When events are due, and what they do to lengths; it may be a field ``trigger``."""
        return cast(Trigger, cast(Any, self).trigger)

    @property
    def event_kind(self) -> EventKind:
        """The kind of its events: what decides how much they keep."""
        if (kind := self.event_trigger.event_kind) is not None:
            return kind
        if self.keeps_blocks:
            return EventKind.BLOCKS
        even = EventKind.REST if self.rest_bits else EventKind.EVEN
        return even if self.granularity is Granularity.MODEL else EventKind.UNEVEN

    @property
    def protected(self) -> int:
        """Newest entries that an event always keeps and does not score."""
        newest: int = getattr(self, self.protects) if self.protects else 0
        return newest

    @property
    def query_reduction(self) -> str | None:
        """``group_mean`` or ``heads``: how logged queries are reduced; ``None``: none needed."""
        return self.query_reduce

    @property
    def logged_dtype(self) -> str:
        """How queries are logged: model (the model's dtype), fp8, int4, or auto (engine's choice):
        the argument ``query_dtype``, where auto is int4 if absolute attention needs it."""
        absolute = self.attention == "absolute"
        return "int4" if self.query_dtype == "auto" and absolute else self.query_dtype

    @property
    def sees_all(self) -> bool:
        """Whether attention is absolute: by default, what the argument ``attention`` says."""
        return self.attention == "absolute"

    @property
    def recomputed_reduction(self) -> str | None:
        """As ``query_reduction``, if queries are recomputed at the event: for triggers that do not
        log, and whose windows are scored by their own tokens."""
        return None

    @property
    def kept_scores(self) -> int:
        """Entries per head whose scores are kept for the next event (0: none)."""
        return 0

    def carried(self, keep: int, length: int) -> int:
        """Of how many of ``keep`` entries that an event leaves of ``length``, the last ones, scores
        are kept for the next event."""
        return keep

    @property
    def scores_levels(self) -> bool:
        """Whether ``score`` takes keys as they are held, too (``Observation.keys``)."""
        return False

    @property
    def leaves(self) -> str:
        """What stands for dropped entries: off (nothing), mean or fitted.

        By default, the argument ``remainder``, and mean where nothing can be fitted: the queries of
        an event say what dropped entries were worth if they are those of the newest entries, which
        see all that is dropped. Where layers share a choice, those that are not scored get means.
        """
        reduction = self.query_reduction or self.recomputed_reduction
        fits = reduction is not None and not self.kept_scores
        return "mean" if self.remainder == "fitted" and not fits else self.remainder or "off"

    def with_statistics(self, file: str | None) -> Policy:
        """The same, which names another file, if it reads any."""
        return self

    @property
    def later_entries(self) -> int:
        """How many entries behind a window's places its scores need the keys of."""
        return 0

    def query_places(self, num_queries: int) -> range:
        """Which of a window's queries score it."""
        return range(num_queries)

    def leaders(self, num_layers: int) -> list[int]:
        """For each layer, the layer whose scores and choice it uses: by default, the first of as
        many as the argument ``reuse_layers`` says."""
        size = self.reuse_layers or 1
        return [layer - layer % size for layer in range(num_layers)]

    # ---- what is kept ----

    def score(self, obs: Observation) -> Tensor:
        """Scores of the first S' places in the leader layers, higher is kept.

        float32 [E, L', Hkv, S'].
        """
        raise NotImplementedError(f"policy {self.name} scores nothing")

    def remainder_of(self, obs: Observation, dropped: Tensor) -> Remainder:
        """What stands for the places ``dropped``, bool [E, L, Hkv, n], where it is fitted.

        By default, to the causal attention of the observed queries.
        """
        return obs.causal_remainder(dropped, absolute=self.sees_all)

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """``keep`` of a window's ``length`` places, ascending int64 [E, L', Hkv, keep].

        By default: all places behind the scored ones, and the best of the scored ones.
        """
        from kvserve.engine.policies.selection import best_and_newest

        return best_and_newest(scores, length, keep)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """As ``select``, for counts that differ; most policies take ``keep`` as their mean.

        A lane that holds fewer than ``length`` entries begins at a later place: the places before
        it score -inf. Counts never exceed the entries that a lane holds.
        """
        indices = self.select(scores, length, keep)
        return Selection(indices, torch.full_like(indices[..., 0], keep))

    def survivors(self, obs: Observation, keep: int) -> Tensor:
        """The ``keep`` places of a layer's tokens that the next layer computes: ascending int64.

        For policies that prune a prompt while it is computed, whose trigger is a ``Pruned``.
        obs: one event of one layer, with the queries of its recent tokens.
        """
        raise NotImplementedError(f"policy {self.name} prunes nothing")
