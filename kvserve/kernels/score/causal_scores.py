"""How much attention the last queries of a row pay to the entries before them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.store.int4_log import Int4Queries
from kvserve.kernels.store.remainder import Remainder, logits_with

Queries = Tensor | Int4Queries
"""[..., Hq, W, D], as numbers or as they are logged in 4 bits."""

PIECE_BYTES = 64 * 1024 * 1024
"""Logits that are held at once; scores of more are computed head by head, if need be."""


class _Lanes(NamedTuple):
    """Arguments of a score that have heads: ``query [..., Hq, W, D]``, ``key [..., Hkv, n, D]``."""

    query: Queries
    key: Tensor
    missing: Tensor | None
    shares: Tensor | None
    remainder: Remainder | None
    sinks: Tensor | None

    def score(self, score: Callable[[_Lanes], Tensor], rows: int | None = None) -> Tensor:
        """``score`` of all lanes, or of the two halves of the first dimension that can be divided,
        heads at last, if the logits of ``rows`` of the W queries (default: all) do not fit
        ``PIECE_BYTES``."""
        *lanes, queries, _ = self.query.shape
        size = 4 * math.prod(lanes) * min(queries, rows or queries) * self.key.shape[-2]
        dims = self.key.shape[:-2]  # the dimension is counted from the key's end
        dim = next((len(dims) + 2 - i for i, count in enumerate(dims) if count > 1), 0)
        if size <= PIECE_BYTES or not dim:
            return score(self)
        count = self.key.shape[-dim]
        halves = (self._part(dim, *ends) for ends in ((0, count // 2), (count // 2, count)))
        return torch.cat([half.score(score, rows) for half in halves], dim=1 - dim)

    def _part(self, dim: int, first: int, end: int) -> _Lanes:
        group = self.query.shape[-3] // self.key.shape[-3] if dim == 3 else 1

        def cut(x: Tensor, behind: int, heads: int = 1) -> Tensor:
            """``behind``: how many dimensions ``x`` lacks at its end beside a key's."""
            return x.narrow(behind - dim, first * heads, (end - first) * heads)

        query = self.query
        if isinstance(query, Tensor):
            query = cut(query, 0, group)
        else:
            query = Int4Queries(*(cut(part, 0, group) for part in query))
        missing = None if self.missing is None else cut(self.missing, 1)
        shares = None if self.shares is None else cut(self.shares, 1, group)
        left = self.remainder
        if left is not None:
            left = Remainder(cut(left.keys, 1), cut(left.values, 1), cut(left.bias, 2))
        sinks = None if self.sinks is None else cut(self.sinks, 2, group)
        return _Lanes(query, cut(self.key, 0), missing, shares, left, sinks)


def causal_scores(
    query: Queries,
    key: Tensor,
    scale: float,
    gqa_reduce: str = "mean",
    missing: Tensor | None = None,
    shares: Tensor | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Mean probability that the last W of n tokens give each earlier one, over a group's heads.

    query: [..., Hq, W, D], those of the last W keys; key: [..., Hkv, n, D]. Query i sees keys up to
    n - W + i; the softmax runs over all it sees, and the window's own columns are dropped after it.
    Keys that are ``missing [..., Hkv, n]`` are seen by no query and get 0; the window's keys are
    never missing. Without ``shares`` the softmax runs over the keys that are held. With ``shares``
    float32 [..., Hq, W] it runs over all keys that a query saw in its own step: a share is the
    logarithm of the part of its attention that the window's keys then got. A ``remainder
    [..., Hkv, ...]`` takes part in the softmax, if there is one, and so do ``sinks`` float32 [...,
    Hq], each a logit of its head (shares have counted both). Returns float32 [..., Hkv, n - W],
    or [..., Hq, n - W] with ``gqa_reduce`` ``none``. SnapKV, arXiv 2404.14469, section 4.
    """

    def votes_of(lanes: _Lanes) -> Tensor:
        if lanes.shares is not None:
            probs = _absolute_past(lanes, lanes.shares, scale)
        else:
            past = lanes.key.shape[-2] - lanes.query.shape[-2]
            probs = torch.softmax(_causal_logits(lanes, scale), dim=-1)[..., :past]
        votes = probs.mean(dim=-2)
        return votes.flatten(-3, -2) if gqa_reduce == "none" else over_group(votes, gqa_reduce, -2)

    return _Lanes(query, key, missing, shares, remainder, sinks).score(votes_of)


def causal_log_sums(
    query: Queries,
    key: Tensor,
    scale: float,
    missing: Tensor | None = None,
    shares: Tensor | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The logarithm of what each query's softmax divides by: float32 [..., Hq, W].

    Arguments are those of ``causal_scores``.
    """
    lanes = _Lanes(query, key, missing, shares, remainder, sinks)
    if shares is not None:
        _, total = _absolute_logits(lanes, shares, scale)
    else:
        total = _causal_logits(lanes, scale).logsumexp(dim=-1)
    return total.flatten(-3, -2)


def past_scores(
    query: Queries,
    key: Tensor,
    scale: float,
    gqa_reduce: str = "max",
    missing: Tensor | None = None,
    shares: Tensor | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """As ``causal_scores``, but the softmax runs over the n - W earlier keys alone, and comes last.

    Logits are reduced over a group's heads before it; each row of the result adds to 1. The
    importance of R-KV, arXiv 2505.24133, section 3, and its decode-time SnapKV. With ``shares``
    there is no such softmax: a group's absolute probabilities are reduced.
    """

    def probs_of(lanes: _Lanes) -> Tensor:
        if lanes.shares is not None:
            probs = _absolute_past(lanes, lanes.shares, scale)
            return over_group(probs, gqa_reduce, -3).mean(dim=-2)
        past = lanes.key[..., : lanes.key.shape[-2] - lanes.query.shape[-2], :]
        logits = logits_of(lanes.query, past, scale)
        if lanes.missing is not None:
            # Not -inf, which would make NaN of a lane that holds nothing but the window.
            none = lanes.missing[..., None, None, : past.shape[-2]]
            logits = logits.masked_fill(none, torch.finfo(logits.dtype).min)
        logits = _with_beside(logits, lanes, scale)
        probs = torch.softmax(over_group(logits, gqa_reduce, -3), dim=-1)
        return probs[..., : past.shape[-2]].mean(dim=-2)

    return _Lanes(query, key, missing, shares, remainder, sinks).score(probs_of)


def received_mass(
    query: Queries,
    key: Tensor,
    scale: float,
    weights: Tensor | None = None,
    missing: Tensor | None = None,
    remainder: Remainder | None = None,
    sinks: Tensor | None = None,
    block: int = 256,
) -> Tensor:
    """Attention each key got from the last Q queries, summed over them and over a group's heads.

    query: [..., Hq, Q, D]; key: [..., Hkv, n, D]; query i sees keys up to n - Q + i, except those
    ``missing [..., Hkv, n]``, and counts ``weights [Q]`` times. Returns float32
    [..., Hkv, n], each KV head adding to group * Q. Rows are taken ``block`` at a time, so that no
    [Q, n] matrix is held. H2O, arXiv 2306.14048, section 4.
    """

    def mass_of(lanes: _Lanes) -> Tensor:
        mass = torch.zeros(lanes.key.shape[:-1], dtype=torch.float32, device=key.device)
        count, length = lanes.query.shape[-2], lanes.key.shape[-2]
        for start in range(0, count, block):
            some = slice(start, start + block)
            query = lanes.query
            query = query[..., some, :] if isinstance(query, Tensor) else query.rows(some)
            part = lanes._replace(query=query)
            probs = torch.softmax(_causal_logits(part, scale, length - count + start), dim=-1)
            probs = probs[..., :length]
            if weights is not None:
                probs *= weights[some, None]
            mass += probs.sum(dim=(-3, -2))
        return mass

    return _Lanes(query, key, missing, None, remainder, sinks).score(mass_of, block)


def _causal_logits(lanes: _Lanes, scale: float, first: int | None = None) -> Tensor:
    """Of queries at the places from ``first`` on (default: the last): float32 [..., Hkv, group, W,
    n], and of what is beside the keys."""
    window, length = lanes.query.shape[-2], lanes.key.shape[-2]
    place = torch.arange(length, device=lanes.key.device)
    first = length - window if first is None else first
    unseen = place > place[first : first + window, None]
    if lanes.missing is not None:
        unseen = unseen | lanes.missing[..., None, None, :]
    logits = logits_of(lanes.query, lanes.key, scale).masked_fill_(unseen, -torch.inf)
    return _with_beside(logits, lanes, scale)


def _with_beside(logits: Tensor, lanes: _Lanes, scale: float) -> Tensor:
    """``logits`` [..., Hkv, group, W, n] with a column for a remainder, and one for sinks."""
    if lanes.remainder is not None:
        logits = logits_with(logits, lanes.query.float(), lanes.remainder, scale)
    if lanes.sinks is not None:
        own = lanes.sinks.unflatten(-1, logits.shape[-4:-2])[..., None, None]
        logits = torch.cat([logits, own.expand(*logits.shape[:-1], 1)], dim=-1)
    return logits


def _absolute_past(lanes: _Lanes, shares: Tensor, scale: float) -> Tensor:
    """What the last W of n tokens give earlier ones: float32 [..., Hkv, group, W, n - W]."""
    logits, total = _absolute_logits(lanes, shares, scale)
    return torch.exp(logits - total[..., None])


def _absolute_logits(lanes: _Lanes, shares: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Of the last W of n tokens with the n - W earlier ones, and their log-sums over all seen."""
    window, past = lanes.query.shape[-2], lanes.key.shape[-2] - lanes.query.shape[-2]
    logits = logits_of(lanes.query, lanes.key, scale)
    if lanes.missing is not None:
        logits = logits.masked_fill(lanes.missing[..., None, None, :], -torch.inf)
    own = logits[..., past:]
    place = torch.arange(window, device=own.device)
    own = own.masked_fill(place > place[:, None], -torch.inf)
    shared = own.logsumexp(dim=-1)
    total = shared - shares.unflatten(-2, logits.shape[-4:-2])
    # Rounded queries could make the probabilities add to more than 1.
    total = total.maximum(torch.logaddexp(logits[..., :past].logsumexp(dim=-1), shared))
    return logits[..., :past], total


def logits_of(query: Queries, key: Tensor, scale: float) -> Tensor:
    """float32 [..., Hkv, group, W, n]. A group's queries are folded, so no key is repeated."""
    kv_heads, window = key.shape[-3], query.shape[-2]
    group = query.shape[-3] // kv_heads
    folded = query.float().unflatten(-3, (kv_heads, group)).flatten(-3, -2)
    return (folded @ key.float().transpose(-1, -2) * scale).unflatten(-2, (group, window))


def over_group(x: Tensor, reduction: str, dim: int) -> Tensor:
    if reduction == "max":
        return x.amax(dim)
    if reduction == "rms":
        return x.square().mean(dim).sqrt()
    return x.sum(dim) if reduction == "sum" else x.mean(dim)
