"""A remainder fitted to what observed queries gave to the entries that are dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from kvserve.kernels.remainder import Remainder
from kvserve.kernels.scores.causal_scores import Queries, logits_of


def fitted_remainder(
    query: Queries, key: Tensor, value: Tensor, dropped: Tensor, log_sums: Tensor, scale: float
) -> Remainder:
    """One entry to which the queries give as much as they gave to all that is dropped.

    query: [..., Hq, Q, D]; key, value: [..., Hkv, n, D]; dropped: bool [..., Hkv, n]; log_sums:
    float32 [..., Hq, Q], the logarithm of each query's sum of exp(q . k). Key and value are means
    weighted by what the queries of a group gave to each dropped entry. The bias b meets their mass
    on these: sum exp(q . k + b - log_sum) is the same for the one entry as for all it stands for.
    Returns float32 [..., Hkv, D] and [..., Hkv]; a bias of -inf where no query gave them anything.
    """
    given = probs_of(query, key, log_sums, scale).sum(dim=(-3, -2)) * dropped
    mass = given.sum(dim=-1)
    share = (given / mass.clamp(min=torch.finfo(torch.float32).tiny)[..., None])[..., None, :]
    keys, values = share @ key.float(), (share @ value.float())[..., 0, :]
    one = probs_of(query, keys, log_sums, scale).sum(dim=(-3, -2))[..., 0]
    bias = torch.where(mass > 0, mass.log() - one.log(), -torch.inf)
    return Remainder(keys[..., 0, :], values, bias)


def probs_of(query: Queries, key: Tensor, log_sums: Tensor, scale: float) -> Tensor:
    """What each query gives each key: float32 [..., Hkv, group, Q, n]."""
    totals = log_sums.unflatten(-2, (key.shape[-3], -1))
    return torch.exp(logits_of(query, key, scale) - totals[..., None])
