"""A policy on one row, without an engine; choices as lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.policies import registry
from kvserve.engine.policies.base import Policy, Selection
from kvserve.engine.policies.scoring import Observation
from kvserve.scheduler.triggers.trigger import RowState

Places = list[list[list[int]]]


@contextmanager
def plug_ins(*policies: type[Policy]) -> Iterator[None]:
    """Let these policies be installed."""

    class Entry:
        def __init__(self, policy: type[Policy]) -> None:
            self.name, self.load = policy.name, lambda: policy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", lambda group: map(Entry, policies))
        registry._entries.cache_clear()
        yield
    registry._entries.cache_clear()


def observe(queries: Tensor, keys: Tensor, scale: float = 1.0) -> Observation:
    """One event of one layer: queries [Hq, W, D], keys [Hkv, n, D]."""
    return Observation(queries[None, None], keys[None, None], scale)


def choose(policy: Policy, obs: Observation, keep: int) -> list[list[int]]:
    """Kept places of each KV head; checks that only scores that join heads say so."""
    joined: list[Tensor] = []

    def gather(x: Tensor) -> Tensor:
        joined.append(x)
        return obs.gather(x)

    noted = replace(obs, gather=gather)
    kept = policy.select(policy.score(noted), obs.keys.shape[-2], keep)
    assert bool(joined) == policy.couples_heads
    places: list[list[int]] = kept[0, 0].tolist()
    return places


def follow(policy: Policy, keys: Tensor, num_prompt: int) -> tuple[list[int], list[list[int]]]:
    """Store keys [n, D] one by one. Where events ran, and what was held after each key."""
    prompt = np.array([num_prompt], np.int32)
    held: list[int] = []
    events, history = [], []
    first_uncompressed_pos = policy.event_trigger.start(prompt)

    def rows(computed: int) -> RowState:
        seen, length = (np.array([n], np.int32) for n in (computed, len(held)))
        return RowState(prompt, seen, length, first_uncompressed_pos)

    due = int(policy.event_trigger.next_event(rows(0))[0])
    for position in range(len(keys)):
        if position == due:
            plan = policy.event_trigger.plan(rows(position))
            start, keep = int(plan.region_start[0]), int(plan.keep[0])
            region = keys[held[start:]]
            queries = torch.zeros(1, policy.event_trigger.num_queries, keys.shape[1])
            (kept,) = choose(policy, observe(queries, region[None]), keep)
            held = held[:start] + [held[start + place] for place in kept]
            first_uncompressed_pos = plan.first_uncompressed_pos
            events.append(position)
            due = int(policy.event_trigger.next_event(rows(position))[0])
        held = [*held, position]
        history.append(held)
    return events, history


def places(selection: Selection, event: int = 0) -> Places:
    """Kept places of each layer and head; checks that they ascend."""
    indices, counts = selection.indices[event].tolist(), selection.counts[event].tolist()
    kept = [
        [row[:count] for row, count in zip(heads, ns, strict=True)]
        for heads, ns in zip(indices, counts, strict=True)
    ]
    assert all(row == sorted(set(row)) for heads in kept for row in heads)
    return kept


def choose_unevenly(policy: Policy, scores: Tensor, length: int, keep: int) -> Places:
    """Kept places of each layer and head, for scores [L, H, n] of one event."""
    return places(policy.choose(scores[None], length, keep))


def best(scores: list[float], count: int, length: int) -> list[int]:
    """The ``count`` best places, the first of equals first, and those without a score."""
    order = sorted(range(len(scores)), key=lambda j: (-scores[j], j))
    return sorted(order[:count]) + list(range(len(scores), length))


def tied(*shape: int, seed: int) -> Tensor:
    """Random scores, most of them equal to some other."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 12, shape, generator=generator) / 16
