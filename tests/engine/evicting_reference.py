"""What decoding with remainders must equal: transformers in float64, with attention that evicts.

After an event a query sees what its layer and KV head still hold, and one entry for all that they
have dropped. Nothing here is the engine's: keys, values and queries are those of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvserve.engine.frontend.inspect import Event
from kvserve.entry_format import EntryFormat
from kvserve.kernels.store.quantized_entries import quantize
from tests.engine.dense_reference import Vectors, attention, exact_entries


@dataclass
class Lost:
    """What stands for the dropped entries of a layer and KV head: key, value, weight."""

    key: Tensor
    value: Tensor
    weight: float = 0.0

    def add(self, key: Tensor, value: Tensor, weight: float) -> None:
        total = self.weight + weight
        share = weight / total if total else 0.0
        self.key = self.key + share * (key - self.key)
        self.value = self.value + share * (value - self.value)
        self.weight = total


Fit = Callable[["Lane", int, list[int]], tuple[Tensor, Tensor, float]]
"""Key, value and weight of an event's dropped positions, given the lane and the event's number."""


@dataclass
class Lane:
    """One layer and KV head: queries [G, T, D], scaled, keys and values [T, D], and its events."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    held: list[list[int]]
    """Positions held before each event, and after the last token."""
    lost: Lost
    weights: list[float] = field(default_factory=list)
    """The remainder's weight after each event."""


def mean(lane: Lane, event: int, dropped: list[int]) -> tuple[Tensor, Tensor, float]:
    """The mean key and value; the weight is their number."""
    return lane.keys[dropped].mean(0), lane.values[dropped].mean(0), float(len(dropped))


def fitted(queries_of: Callable[[int], tuple[list[int], list[int] | None]], first: int = 0) -> Fit:
    """By the attention of an event's queries, query by query, to positions from ``first`` on.

    ``queries_of`` gives their positions and the places of the entries, in order, over which their
    softmax runs without a mask; ``None``: over all that each query held, and the remainder.
    """

    def fit(lane: Lane, event: int, dropped: list[int]) -> tuple[Tensor, Tensor, float]:
        asking, places = queries_of(event)
        held = lane.held[event]
        given, one = torch.zeros(len(dropped), dtype=torch.float64), 0.0
        sums: list[tuple[Tensor, Tensor]] = []
        for query in (lane.queries[g, t] for g in range(len(lane.queries)) for t in asking):
            t = asking[len(sums) % len(asking)]
            seen = (
                [p for p in held if first <= p <= t]
                if places is None
                else [held[i] for i in places]
            )
            total = (lane.keys[seen] @ query).exp().sum()
            if places is None and lane.lost.weight:
                total += lane.lost.weight * (lane.lost.key @ query).exp()
            sums.append((query, total))
            given += (lane.keys[dropped] @ query).exp() / total
        share = given / given.sum()
        key, value = share @ lane.keys[dropped], share @ lane.values[dropped]
        one = sum(float((key @ query).exp() / total) for query, total in sums)
        return key, value, float(given.sum()) / one

    return fit


@dataclass(frozen=True)
class EvictingPass:
    """logits [T, V] in float64, and every lane by (layer, KV head), as it is at the end."""

    logits: Tensor
    lanes: dict[tuple[int, int], Lane]


def evicting_pass(
    model: PreTrainedModel,
    tokens: list[int],
    events: Sequence[Event],
    fit: Fit,
    form: EntryFormat | None = None,
    held: Mapping[int, Vectors] | None = None,
    intact: int = 0,
) -> EvictingPass:
    """One pass over ``tokens`` whose queries see what ``events`` have left, and remainders.

    Keys and values are rounded to ``form``, if given, or are those that layers ``held``; except
    those that a query reads as they were computed.
    """
    lanes: dict[tuple[int, int], Lane] = {}
    near = exact_entries(len(tokens), events, form, intact)

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **how: Any) -> Any:
        exact = k[0], v[0]
        if held is not None:
            k, v = (x[None].double() for x in held[module.layer_idx])
        elif form is not None:
            both = zip((k, v), (form.key, form.value), strict=True)
            k, v = (quantize(x, of).widened().double() for x, of in both)
        group = q.shape[1] // k.shape[1]
        queries = q[0].unflatten(0, (-1, group)) * how["scaling"]
        heads = []
        for head in range(k.shape[1]):
            nothing = torch.zeros(k.shape[-1], dtype=torch.float64)
            lane = Lane(queries[head], k[0, head], v[0, head], [], Lost(nothing, nothing))
            own = exact[0][head], exact[1][head], near
            heads.append(_attend(lane, events, module.layer_idx, head, fit, own))
            lanes[module.layer_idx, head] = lane
        return torch.cat(heads).transpose(0, 1)[None], None

    with attention(model, attend), torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[0]
    return EvictingPass(logits, lanes)


def _attend(
    lane: Lane,
    events: Sequence[Event],
    layer: int,
    head: int,
    fit: Fit,
    exact: tuple[Tensor, Tensor, Tensor],
) -> Tensor:
    """[G, T, D]: one lane's queries, each over what was held when it ran; ``exact`` are keys and
    values [T, D] before they were rounded, and which of them a query reads, [T, T]."""
    length = lane.keys.shape[0]
    out = torch.zeros_like(lane.queries)
    ends = [event.seen for event in events] + [length]
    held, start = list[int](), 0
    for number, end in enumerate(ends):
        for t in range(start, end):
            held.append(t)
            near, bias = exact[2][t, held, None], torch.zeros(len(held))
            keys, values = (
                torch.where(near, whole[held], x[held])
                for whole, x in zip(exact[:2], (lane.keys, lane.values), strict=True)
            )
            if lane.lost.weight:
                keys = torch.cat([keys, lane.lost.key[None]])
                values = torch.cat([values, lane.lost.value[None]])
                bias = torch.cat([bias, torch.tensor([lane.lost.weight]).double().log()])
            logits = lane.queries[:, t] @ keys.T + bias
            out[:, t] = torch.softmax(logits, dim=-1) @ values
        lane.held.append(held[:])
        if number < len(events):
            kept = events[number].held[layer][head]
            kept = kept[kept >= 0].tolist()
            dropped = sorted({*held} - {*kept})
            if dropped:
                lane.lost.add(*fit(lane, number, dropped))
            lane.weights.append(lane.lost.weight)
            held = list(map(int, kept))
        start = end
    return out


def as_arrays(found: EvictingPass, layers: int, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [L, Hkv, D] and the logarithms of weights [L, Hkv] at the end."""
    lost = [found.lanes[at].lost for at in np.ndindex(layers, heads)]
    keys, values = (
        torch.stack(part).unflatten(0, (layers, heads))
        for part in ([x.key for x in lost], [x.value for x in lost])
    )
    weights = torch.tensor([x.weight for x in lost], dtype=torch.float64)
    return keys, values, weights.log().view(layers, heads)
