"""Mixtures of experts: which of them take a token, and what their answers add up to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """T tokens with k experts each, sorted by expert: ``tokens [T k]`` are their rows in the batch,
    expert e has those from ``ends[e - 1]`` to ``ends[e]`` (int32 [E]); ``place [T, k]`` is where
    each pair went, ``weights [T, k]`` what its answer counts. ``experts [T k]`` ascend."""

    tokens: Tensor
    ends: Tensor
    place: Tensor
    weights: Tensor
    experts: Tensor


def route(logits: Tensor, per_token: int, normalised: bool) -> Routes:
    """logits: [T, E]. Of the softmax over all experts, the largest ``per_token``; ``normalised``:
    so that they add up to one. Nothing is copied to the host."""
    probs = logits.float().softmax(dim=-1)
    weights, chosen = probs.topk(per_token, dim=-1)
    if normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    by_expert, order = chosen.flatten().sort(stable=True)
    experts = torch.arange(logits.shape[1], device=logits.device)
    ends = torch.searchsorted(by_expert, experts, right=True).int()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return Routes(order // per_token, ends, place.view_as(chosen), weights, by_expert)


def combine(answers: Tensor, routes: Routes) -> Tensor:
    """answers: [T k, hidden], sorted by expert -> their weighted sums, [T, hidden]."""
    weighted = answers[routes.place] * routes.weights.to(answers.dtype)[..., None]
    return weighted.sum(dim=1)
