"""What a policy can score with: the only interface from policies to the kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvserve.kernels.checks import AGGREGATES, FUTURES, GQA_REDUCTIONS, GROUP_AGGREGATES
from kvserve.kernels.score.pooling import POOLINGS, pool_scores
from kvserve.kernels.score.seen import Given, Seen
from kvserve.kernels.store.remainder import Remainder
from kvserve.late import Late

if TYPE_CHECKING:
    from kvserve.kernels.score.causal_scores import Queries
    from kvserve.kernels.score.centre_scores import Centres

_Scores = Callable[..., Tensor]
causal_log_sums: _Scores = Late("kernels.score.causal_scores:causal_log_sums")
causal_scores: _Scores = Late("kernels.score.causal_scores:causal_scores")
past_scores: _Scores = Late("kernels.score.causal_scores:past_scores")
received_mass: _Scores = Late("kernels.score.causal_scores:received_mass")
probs_of: _Scores = Late("kernels.score.fitted_remainder:probs_of")
fitted_remainder: Callable[..., Remainder] = Late("kernels.score.fitted_remainder:fitted_remainder")
anchor_similarity: _Scores = Late("kernels.score.key_similarity:anchor_similarity")
redundancy: _Scores = Late("kernels.score.key_similarity:redundancy")
window_scores: _Scores = Late("kernels.score.window_scores:window_scores")

__all__ = [
    "AGGREGATES",
    "FUTURES",
    "GQA_REDUCTIONS",
    "GROUP_AGGREGATES",
    "POOLINGS",
    "Observation",
    "Remainder",
    "pool_scores",
]


@dataclass(frozen=True, slots=True)
class Observation:
    """A batch of E equal-shaped events: ``queries [E, L, Hlog, W, D]``, ``keys [E, L, Hkv, n, D]``.

    Hlog is Hkv if the mean of each GQA group is logged, else Hq. Each query logged in 4 bits has
    the share of its attention that newest entries got, for absolute attention. ``scale`` multiplies
    q . k. ``earlier [E, L, Hkv, m]`` are the scores that the first m entries had after the last
    event, for policies that keep them (m = 0 before the first). ``missing [E, L, Hkv, n]`` is True
    where a shorter lane has no entry: lanes end together, so these are its first places; ``None``:
    no entry is missing. Keys may be ``LevelKeys`` for a policy that ``scores_levels``. The last
    ``later`` keys lie behind the window's places, for policies that ask for them. ``values``, in
    the shape of the keys, are given to policies that declare ``uses_values``, or fit something.
    ``left`` reads the ``remainder [E, L, Hkv, ...]``, for policies that look at it.
    ``sinks`` float32 [E, L, Hlog] take part in each head's softmax, if the model has them.
    ``centres`` are where the model's queries usually point, for policies that use them;
    ``positions [E]`` are the sequences' next logical positions then.

    Heads are those of this tensor-parallel rank; ``gather`` joins those of all ranks (dim 2).
    """

    queries: Queries
    keys: Tensor
    scale: float
    earlier: Tensor | None = None
    missing: Tensor | None = None
    gather: Callable[[Tensor], Tensor] = lambda x: x
    later: int = 0
    values: Tensor | None = None
    left: Callable[[], Remainder | None] = lambda: None
    sinks: Tensor | None = None
    centres: Centres | None = None
    positions: Tensor | None = None
    _known: list[Given] = field(default_factory=list, repr=False)

    @property
    def remainder(self) -> Remainder | None:
        """What stands for all that was dropped before: [E, L, Hkv, ...]; ``None``: nothing was."""
        return self.left()

    def mass(
        self,
        aggregate: str,
        group_aggregate: str = "mean",
        places: range | None = None,
        recent: int | None = None,
    ) -> Tensor:
        """Attention each key gets from the window: float32 [E, L, Hkv, n] (Kara, Eq. 4).

        If the queries' ``places`` in the window are given, attention is absolute: the softmax runs
        over all entries that a query saw and over those after it, the ``later`` ones included.
        Shares are then of the entries from the last multiple of ``recent`` on (default: n).
        """
        keys, seen, given = self.keys, None, None
        span = keys.shape[-2] - self.later
        if places is None:
            keys = keys[..., :span, :]
        else:
            assert not isinstance(self.queries, Tensor), "absolute attention needs a log in 4 bits"
            seen = Seen(self.queries.shares, recent or span, places.start, places.step, self.later)
        if self.values is not None:  # something is fitted
            device = self.values.device
            log_sums = torch.empty(self.queries.shape[:-1], device=device)
            given = Given(log_sums, torch.empty(*keys.shape[:-2], span, device=device))
            self._known.append(given)
        how = self.scale, aggregate, group_aggregate, seen, given
        return window_scores(self.queries, keys, *how)

    def fitted_remainder(self, dropped: Tensor, places: range | None = None) -> Remainder:
        """What stands for the places ``dropped``, bool [E, L, Hkv, n], by the attention of
        ``mass``, which is asked again unless it was asked before."""
        if not self._known:
            self.mass("sum", "mean", places)
        return self._fitted(dropped, self._known[-1])

    def causal_remainder(self, dropped: Tensor, *, absolute: bool = False) -> Remainder:
        """What stands for the places ``dropped``, bool [E, L, Hkv, n], by the attention of
        ``causal``."""
        beside = self._beside(absolute)
        sums = causal_log_sums(self.queries, self.keys, self.scale, *beside)
        keys = self.keys[..., : dropped.shape[-1], :]
        probs = probs_of(self.queries, keys, sums, self.scale)
        return self._fitted(dropped, Given(sums, probs.sum(dim=(-3, -2))))

    def _fitted(self, dropped: Tensor, given: Given) -> Remainder:
        assert self.values is not None, "values come to policies that fit"
        length = dropped.shape[-1]
        key, value = self.keys[..., :length, :], self.values[..., :length, :]
        return fitted_remainder(self.queries, key, value, dropped, given, self.scale)

    def causal(self, gqa_reduce: str, *, absolute: bool = False) -> Tensor:
        """Mean probability that earlier keys get from the last W: float32 [E, L, Hkv, n - W]; with
        ``gqa_reduce`` none, that of every query head by itself, [E, L, Hlog, n - W].

        ``absolute``: the softmax runs over all that a query saw, evicted or unobserved entries too.
        """
        beside = self._beside(absolute)
        return causal_scores(self.queries, self.keys, self.scale, gqa_reduce, *beside)

    def past(self, gqa_reduce: str, *, absolute: bool = False) -> Tensor:
        """As ``causal``, but logits are reduced first, and the softmax runs over earlier keys only.

        ``absolute``: probabilities are reduced instead, and the softmax is over all a query saw.
        """
        beside = self._beside(absolute)
        return past_scores(self.queries, self.keys, self.scale, gqa_reduce, *beside)

    def _beside(self, absolute: bool) -> tuple[Any, ...]:
        """What causal kernels are told beside queries and keys."""
        shares = None
        if absolute:
            assert not isinstance(self.queries, Tensor), "absolute attention needs a log in 4 bits"
            shares = self.queries.shares
        return self.missing, shares, self.remainder, self.sinks

    def accumulated_mass(self) -> Tensor:
        """Attention received since each entry came, or from the observed queries alone without
        ``kept_scores``, summed over a group's heads: float32 [E, L, Hkv, n] (H2O)."""
        beside = None, None, self.remainder, self.sinks
        mass = received_mass(self.queries, self.keys, self.scale, *beside)
        if self.earlier is not None:
            mass[..., : self.earlier.shape[-1]] += self.earlier
        return mass

    def weighted_mass(self, weights: Tensor) -> Tensor:
        """Attention that earlier keys get from the last W queries, weighted by ``weights [W]``.

        The mean over these queries and over the query heads of all ranks, repeated for each KV
        head: float32 [E, L, H, n - W], -inf where no entry is. Lanes of a layer have one length.
        """
        (heads, window), kv_heads = self.queries.shape[-3:-1], self.keys.shape[-3]
        beside = weights, self.missing, self.remainder, self.sinks
        mass = received_mass(self.queries, self.keys, self.scale, *beside)
        mass = self.all_heads(mass[..., : mass.shape[-1] - window])
        mean = mass.mean(dim=2, keepdim=True) / (heads // kv_heads * window)
        if self.missing is not None:
            mean = mean.masked_fill(self.missing[:, :, :1, : mean.shape[-1]], -torch.inf)
        return mean.expand_as(mass)

    def redundancy(self, threshold: float) -> Tensor:
        """How much each key repeats others: float32 [E, L, Hkv, n], rows adding to 1 (R-KV)."""
        return redundancy(self.keys, threshold, self.missing)

    def anchor_similarity(self) -> Tensor:
        """Each key's cosine with the mean direction: float32 [E, L, Hkv, n] (KeyDiff)."""
        return anchor_similarity(self.keys, self.missing)

    def by_centres(self, future: str, length: int, *, normalise: bool) -> Tensor:
        """How much queries at the centres will attend to the first ``length`` keys, by the best
        query head of each KV head: float32 [E, L, Hkv, length] (TriAttention)."""
        assert self.centres is not None and self.positions is not None, "uses_centres asks for them"
        return self.centres.scores(self.keys[..., :length, :], self.positions, future, normalise)

    def all_heads(self, x: Tensor) -> Tensor:
        """``x [E, L, H, ...]`` of this rank's heads (KV or query), joined with all other ranks'."""
        return self.gather(x)

    def exist(self, length: int) -> Tensor | bool:
        """Which of the first ``length`` places hold an entry: bool [E, L, Hkv, length]."""
        return True if self.missing is None else ~self.missing[..., :length]

    def there(self, scores: Tensor) -> Tensor:
        """``scores [E, L, Hkv, S']`` of the first S' places, -inf where no entry is."""
        if self.missing is None:
            return scores
        return scores.masked_fill(self.missing[..., : scores.shape[-1]], -torch.inf)
