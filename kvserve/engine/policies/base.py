"""What every policy offers: its fields are its hyper-parameters, its methods are pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, cast

import torch
from torch import Tensor

from kvserve.engine.policies.parts.arguments import (
    PolicyError,
    argument,
    check_arguments,
    check_bounds,
    exact_ratio,
    field_names,
    integers,
    number,
    odd,
    one_of,
    require,
)
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.policies.selection import best_and_newest
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.trigger import Trigger

__all__ = [
    "Policy",
    "PolicyError",
    "PruningPolicy",
    "Selection",
    "UnevenPolicy",
    "argument",
    "exact_ratio",
    "field_names",
    "integers",
    "number",
    "odd",
    "one_of",
    "require",
]


@dataclass(frozen=True, slots=True)
class Selection:
    """Kept places of E events: the first ``counts [E, L', Hkv]`` of ``indices [E, L', Hkv, K]``.

    int64; these ascend, what stands behind them does not matter. Counts are equal over heads where
    a policy's granularity is LAYER. ``heads``, as ``indices``, says by its bits which query heads
    of the group attend to a place, for policies whose entries are held as codes; ``None``: all.
    """

    indices: Tensor
    counts: Tensor
    heads: Tensor | None = None


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
    """Fields of which one has to be given."""
    granularity: ClassVar[Granularity] = Granularity.MODEL
    """LAYER or HEAD where lengths differ after its events."""
    keeps_blocks: ClassVar[bool] = False
    """It is uneven and keeps whole blocks (the last one aside): no entry moves."""
    cuts_again: ClassVar[bool] = False
    """It is uneven, and its events may follow one another on lanes that hold unequally much."""
    ranks_entries: ClassVar[bool] = False
    """Its scores rank single entries, so another policy may share them out (AdaKV)."""
    protects: ClassVar[str] = ""
    """The field that counts the newest entries which an event always keeps and does not score."""

    # ---- whether its arguments can work ----

    def __post_init__(self) -> None:
        check_arguments(self)
        self.check()

    def check(self) -> None:
        """Raise ``PolicyError`` unless the arguments, right by themselves, go together."""

    def check_bounds(self, max_model_len: int, pool_tokens: int | None = None) -> None:
        """Raise ``PolicyError`` where an argument exceeds a server's context, or its pool."""
        check_bounds(self, max_model_len, pool_tokens)

    def for_model(self, num_layers: int, block_size: int) -> Policy:
        """This policy with what depends on the model filled in; what runs is the result.

        Raises ``PolicyError`` where the model rules it out.
        """
        return self

    @property
    def caution(self) -> str:
        """What the start-up table says of it on this model, if there is something to say."""
        return ""

    # ---- when it has events, and what the engine has ready for them ----

    @property
    def event_trigger(self) -> Trigger:
        """When events are due, and what they do to lengths.

        A policy that has no argument ``trigger`` may call it that.
        """
        return cast(Trigger, cast(Any, self).trigger)

    @property
    def protected(self) -> int:
        """Newest entries that an event always keeps and does not score."""
        newest: int = getattr(self, self.protects) if self.protects else 0
        return newest

    @property
    def query_reduction(self) -> str | None:
        """``group_mean`` or ``heads``: how logged queries are reduced; ``None``: none needed.

        An argument ``query_reduce`` says it.
        """
        reduction: str | None = getattr(self, "query_reduce", None)
        return reduction

    @property
    def logged_dtype(self) -> str:
        """How queries are logged: model (the model's dtype), fp8, or auto (the engine's choice).

        An argument ``query_dtype`` says it.
        """
        dtype: str = getattr(self, "query_dtype", "auto")
        return dtype

    @property
    def recomputed_reduction(self) -> str | None:
        """As ``query_reduction``, where queries are recomputed at the event instead of logged.

        For triggers that do not log, and whose windows are scored by their own tokens.
        """
        return None

    @property
    def kept_scores(self) -> int:
        """Entries per head whose scores go on to the next event (0: scores are made anew)."""
        return 0

    @property
    def fits_values(self) -> bool:
        """Whether the values of what it keeps are computed anew (``new_values``)."""
        return False

    @property
    def expects_turns(self) -> bool:
        """Whether an argument says what becomes of later prompts (``--continuations on``)."""
        return False

    @property
    def couples_heads(self) -> bool:
        """Whether counts or choices depend on several KV heads.

        Its scores then are those of all tensor-parallel ranks' heads (``Observation.all_heads``),
        and so are its choices, of which each rank takes its own.
        """
        return False

    @property
    def later_entries(self) -> int:
        """Entries behind a window's places whose keys its scores look at too."""
        return 0

    def query_places(self, num_queries: int) -> range:
        """Which of a window's queries score it."""
        return range(num_queries)

    def leaders(self, num_layers: int) -> list[int]:
        """For each layer, the layer whose scores and choice it uses."""
        return list(range(num_layers))

    # ---- what is kept ----

    def score(self, obs: Observation) -> Tensor:
        """float32 [E, L', Hkv, S'] for the leaders, of the first S' places; higher is kept."""
        raise NotImplementedError(f"policy {self.name} scores nothing")

    def new_values(self, obs: Observation, kept: Tensor) -> Tensor:
        """Values of a window's places ``kept [E, L, Hkv, N]``: float32 [E, L, Hkv, N, D]."""
        raise NotImplementedError(f"policy {self.name} leaves values as they are")

    def select(self, scores: Tensor, length: int, keep: int) -> Tensor:
        """``keep`` of a window's ``length`` places, ascending int64 [E, L', Hkv, keep].

        Unless a policy chooses otherwise: the best ones, and those behind the scored ones.
        """
        return best_and_newest(scores, length, keep)

    def choose(self, scores: Tensor, length: int, keep: int) -> Selection:
        """As ``select``, for lengths that differ: ``keep`` is what counts are on average.

        A place that is not there (where a lane holds less than ``length``, its row begins later)
        scores -inf, and counts never exceed what is there.
        """
        indices = self.select(scores, length, keep)
        return Selection(indices, torch.full_like(indices[..., 0], keep))

    def survivors(self, obs: Observation, keep: int) -> Tensor:
        """The ``keep`` places of a layer's tokens that the next layer computes: ascending int64.

        For policies that prune a prompt while it is computed, whose trigger is a ``Pruned``.
        obs: one event of one layer, with the queries of its recent tokens.
        """
        raise NotImplementedError(f"policy {self.name} prunes nothing")


# Earlier names, for plug-ins: every policy may choose unevenly, or prune.
UnevenPolicy: TypeAlias = Policy
PruningPolicy: TypeAlias = Policy
