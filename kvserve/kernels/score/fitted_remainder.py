"""A remainder fitted to what observed queries gave to the entries that are dropped."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled
from kvserve.kernels.checks import runs_triton
from kvserve.kernels.score.causal_scores import Queries, logits_of
from kvserve.kernels.score.seen import Given
from kvserve.kernels.score.window_scores import five_dims, takes
from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.remainder import Remainder
from kvserve.late import Late

COMPILED = Compiled("fitted_remainder")
log_given_triton: Callable[..., Tensor] = Late(
    "kernels.score.window_scores_triton:log_given_triton"
)


def fitted_remainder(
    query: Queries, key: Tensor, value: Tensor, dropped: Tensor, given: Given, scale: float
) -> Remainder:
    """One entry to which the queries give as much as they gave to all that is dropped.

    query: [..., Hq, Q, D]; key, value: [..., Hkv, n, D]; dropped: bool [..., Hkv, n]; ``given`` are
    the queries' log-sums and what they gave each key. Key and value are means weighted by that. The
    bias b meets the queries' mass on what is dropped: sum exp(q . k + b - log_sum) is the same for
    the one entry as for all it stands for. Returns float32 [..., Hkv, D] and [..., Hkv]; a bias of
    -inf where no query gave them anything.
    """
    how = key, value, dropped, given, scale
    if isinstance(query, Int4Queries) and takes(COMPILED, query, key, value):
        return fitted_remainder_cpu(query, *how)
    return fitted_remainder_torch(query, *how)


def fitted_remainder_torch(
    query: Queries, key: Tensor, value: Tensor, dropped: Tensor, given: Given, scale: float
) -> Remainder:
    """The reference of ``fitted_remainder``; on CUDA a kernel finds what the one entry is given."""
    weights = given.keys * dropped
    mass = weights.sum(dim=-1)
    share = (weights / mass.clamp(min=torch.finfo(torch.float32).tiny)[..., None])[..., None, :]
    keys, values = ((share @ x.float())[..., 0, :] for x in (key, value))
    # Where all queries point elsewhere, what they give the one entry may be less than any float.
    if runs_triton(key):
        one = keys[..., None, :].to(key.dtype)
        log_one = log_given_triton(query, one, given.log_sums, scale)[..., 0]
    else:
        logits = log_probs_of(query, keys[..., None, :], given.log_sums, scale)[..., 0]
        log_one = logits.logsumexp(dim=(-2, -1))
    bias = torch.where(mass > 0, mass.log() - log_one, -torch.inf)
    return Remainder(keys, values, bias)


def fitted_remainder_cpu(
    query: Int4Queries, key: Tensor, value: Tensor, dropped: Tensor, given: Given, scale: float
) -> Remainder:
    """For queries that are logged in 4 bits."""
    *lead, heads, window, dim = query.shape
    codes, keys, values = (five_dims(x) for x in (query.codes, key, value))
    kv_heads, length = keys.shape[2:4]
    scales = query.scales[..., 0].float().mul_(scale)
    dense = [x.contiguous() for x in (scales, given.log_sums, given.keys, dropped)]
    means = scales.new_empty(2, *lead, kv_heads, dim)
    left = Remainder(means[0], means[1], scales.new_empty(*lead, kv_heads))
    COMPILED(
        *(codes, *dense, keys, values, *left),
        *(x.stride()[:4] for x in (codes, keys, values)),
        *(*codes.shape[:2], heads, kv_heads, window, length, dim),
        *(key.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return left


def probs_of(query: Queries, key: Tensor, log_sums: Tensor, scale: float) -> Tensor:
    """What each query gives each key: float32 [..., Hkv, group, Q, n]."""
    return torch.exp(log_probs_of(query, key, log_sums, scale))


def log_probs_of(query: Queries, key: Tensor, log_sums: Tensor, scale: float) -> Tensor:
    """The logarithms of ``probs_of``."""
    totals = log_sums.unflatten(-2, (key.shape[-3], -1))
    return logits_of(query, key, scale) - totals[..., None]
