"""A model's table: what its keys have in common, where its queries look, and what its layers lose
by each bit. Entries in few bits are written by it (``kernels/store/few_levels.py``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvserve.entry_format import BITS, EntryFormat, bits_of_layers, few
from kvserve.kernels.store.entries import FewLayer, Shaping
from kvserve.scheduler.layout import KVLayout, LayerKinds

_FORMAT = "kvserve entry table 1"


@dataclass(frozen=True)
class EntryTable:
    """Of the keys of all layers and KV heads of a model, or of a rank's heads.

    ``mean`` float32 [L, Hkv, D]; ``order`` int64 [L, Hkv, D] and ``feedback`` float32 [L, Hkv, D,
    D] (``Shaping``), or ``None``. ``noise`` float64 [L, 2, 3]: of keys and of values, what a layer
    adds to a hidden state's square by rounding to each of ``BITS``, on average. ``by_head`` float64
    [L, Hkv, 2, 4]: the same of one KV head alone, in 1 to 4 bits, where it was asked for. ``name``
    says of which weights and text; empty: nothing was measured.
    """

    mean: Tensor
    feedback: Tensor | None
    order: Tensor | None
    noise: Tensor
    name: str = ""
    by_head: Tensor | None = None

    @classmethod
    def plain(cls, layers: int, heads: int, dim: int, device: str) -> EntryTable:
        """Of a model of which nothing was measured: keys before values, the first layers before
        others."""
        noise = torch.tensor([[1.1, 0.3, 0.08], [1.0, 0.25, 0.06]], dtype=torch.float64)
        return cls(
            torch.zeros(layers, heads, dim, device=device), None, None, noise.repeat(layers, 1, 1)
        )

    def of_rank(self, rank: int, size: int) -> EntryTable:
        """The heads of one of ``size`` ranks."""
        return self._with(lambda x: x.chunk(size, dim=1)[rank].contiguous())

    def to(self, device: str) -> EntryTable:
        """On another device."""
        return self._with(lambda x: x.to(device))

    def _with(self, change: Callable[[Tensor], Any]) -> EntryTable:
        found = {name: getattr(self, name) for name in ("mean", "feedback", "order")}
        return replace(self, **{n: change(x) for n, x in found.items() if x is not None})

    def layers(
        self, form: EntryFormat, layout: KVLayout, kinds: LayerKinds
    ) -> tuple[FewLayer, ...]:
        """What each layer's entries are, and where they are in their block."""
        found: dict[int, FewLayer] = {}
        sizes = layout.block_size, layout.head_dim, layout.heads_per_block
        parts = self.mean, self.feedback, self.order
        for group in _sharing(layout, kinds):
            shapings = [
                Shaping(*(None if x is None else x[layer] for x in parts))  # type: ignore[arg-type]
                for layer in group
            ]
            bits = self.bits(form, layout.head_dim, group)
            found.update(zip(group, side_by_side(bits, shapings, *sizes), strict=True))
        return tuple(found[layer] for layer in range(kinds.count))

    def bits(self, form: EntryFormat, dim: int, group: list[int]) -> list[tuple[int, int]]:
        """Bits of keys and values of layers that share a block: those of the form or, where they
        differ by layer, one more at a time where the noise falls most for its bytes."""
        if not form.average:
            return [(form.key.bits, form.value.bits)] * len(group)
        there, noise = bits_of_layers(dim), self.noise.tolist()
        lost = [[of[BITS.index(bits)] for bits in there] for layer in group for of in noise[layer]]
        return _shared_out(lost, there, dim, form.level_bytes(dim, len(group)))

    def bits_of_heads(
        self, lanes: list[tuple[int, int]], dim: int, left: int, most: list[int]
    ) -> list[tuple[int, int]]:
        """Bits of keys and values of ``lanes``, layers and KV heads, that share ``left`` bytes an
        entry; each has at most ``most`` of it, keys and values in turns."""
        layer, head = torch.tensor(lanes).T
        if self.by_head is None:  # what a layer loses; three times as much in 1 bit as in 2
            noise = torch.cat([3 * self.noise[layer, :, :1], self.noise[layer]], dim=-1)
        else:
            noise = self.by_head[layer, head]
        there = bits_of_layers(dim, least=1)
        lost = [
            [of[bits - 1] for bits in there if bits <= max(bound, there[0])]
            for of, bound in zip(noise.reshape(-1, 4).tolist(), most, strict=True)
        ]
        return _shared_out(lost, there, dim, left)

    def save(self, path: Path) -> None:
        """To a file that is there as a whole or not at all."""
        parts = {"mean": self.mean, "noise": self.noise}
        if self.by_head is not None:
            parts["by_head"] = self.by_head
        if self.feedback is not None and self.order is not None:
            parts |= {"feedback": self.feedback, "order": self.order}
        held = {name: x.cpu().contiguous() for name, x in parts.items()}
        unfinished = path.with_suffix(f".{id(self)}.tmp")
        unfinished.write_bytes(save(held, {"format": _FORMAT, "name": self.name}))
        unfinished.replace(path)

    @classmethod
    def load(cls, path: Path) -> EntryTable | None:
        """What ``save`` wrote; ``None`` if that is not what is there."""
        try:
            with safe_open(path, "pt") as file:
                facts, names = file.metadata() or {}, set(file.keys())
                if facts.get("format") != _FORMAT or not {"mean", "noise"} <= names:
                    return None
                parts = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError):
            return None
        given = (parts.get("feedback"), parts.get("order"))
        noise, by_head = parts["noise"], parts.get("by_head")
        return cls(parts["mean"], *given, noise, facts["name"], by_head)


def side_by_side(
    bits: Sequence[tuple[int, int]], shapings: Sequence[Shaping], size: int, dim: int, heads: int
) -> list[FewLayer]:
    """Layers of so many ``bits``, one behind the other in blocks of ``size`` tokens."""
    found, at = [], 0
    for (key, value), shaping in zip(bits, shapings, strict=True):
        held = EntryFormat("", few(key), few(value))
        found.append(FewLayer(held.key, held.value, at, shaping))
        at += held.block_bytes(size, dim, 1, heads)
    return found


def _shared_out(
    noise: list[list[float]], there: tuple[int, ...], dim: int, left: int
) -> list[tuple[int, int]]:
    """Which of the bits ``there``, ascending, keys and values (in turns) get of ``left`` bytes: the
    first, then one step at a time where the ``noise``, by vector, falls most for its bytes."""
    sizes = [few(bits).levels(dim) for bits in there]
    chosen, left = [0] * len(noise), left - sizes[0] * len(noise)

    def step(at: int) -> tuple[float, int]:
        now = chosen[at]
        return (noise[at][now + 1] - noise[at][now]) / (sizes[now + 1] - sizes[now]), at

    steps = [step(at) for at, of in enumerate(noise) if len(of) > 1]
    heapify(steps)
    while steps:
        _, at = heappop(steps)
        more = sizes[chosen[at] + 1] - sizes[chosen[at]]
        if more <= left:
            chosen[at], left = chosen[at] + 1, left - more
            if chosen[at] + 1 < len(noise[at]):
                heappush(steps, step(at))
    found = [there[place] for place in chosen]
    return list(zip(found[::2], found[1::2], strict=True))


def _sharing(layout: KVLayout, kinds: LayerKinds) -> Iterator[list[int]]:
    """The layers of each block: those that see all tokens, then those with windows."""
    size = layout.layers_per_block
    windowed = [layer for layer in range(kinds.count) if layer in kinds.windowed]
    for layers in (list(kinds.full), windowed):
        yield from (layers[at : at + size] for at in range(0, len(layers), size))
