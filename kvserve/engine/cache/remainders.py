"""What stands for what events drop of rows, outside the pool.

Remainders lie beside the blocks, at fixed addresses, in float32 whatever entries are held as: each
event adds to them, and bfloat16 would not change by what a late event adds to many. Behind the rows
there are places for the remainders of rows that are away: swapped to host memory, or saved for the
next turn of their conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from kvserve.engine.device.transfer import to_device
from kvserve.kernels.store.remainder import Remainder
from kvserve.late import Late
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.output import RowMove
from kvserve.scheduler.messages.saved_row import NO_PLACE

_add_remainders = Late("kernels.move.events:add_remainders")


class Remainders:
    """``whole`` [L, rows + places, Hkv, ...]; attention reads the rows of one layer of it."""

    def __init__(
        self,
        layout: KVLayout,
        max_rows: int,
        device: str,
        turned: Callable[..., Remainder],
        places: int = 0,
        layers: Iterable[int] | None = None,
    ) -> None:
        """``layers``: what the model calls the layers of ``layout`` (default: by their number).
        ``turned``: how attention reads what stands for entries (``RawEntries.turn_remainder``).
        """
        lanes = layout.num_layers, max_rows + places, layout.num_kv_heads
        vectors = torch.zeros(2, *lanes, layout.head_dim, dtype=torch.float32, device=device)
        bias = torch.full(lanes, -torch.inf, device=device)
        self.whole = Remainder(vectors[0], vectors[1], bias)
        self.used, self._turned = False, turned
        named = range(layout.num_layers) if layers is None else layers
        self._layers = {
            name: self.whole.at(place, slice(max_rows)) for place, name in enumerate(named)
        }

    @property
    def nbytes(self) -> int:
        """Memory that they take, outside the pool."""
        return sum(part.nbytes for part in self.whole)

    def layer(self, layer: int) -> Remainder:
        """[rows, Hkv, ...] of one layer."""
        return self._layers[layer]

    def of(self, rows: Tensor, layers: Tensor | None = None) -> Remainder:
        """Those of ``rows [E]`` in ``layers [L']`` (default: all): [E, L', Hkv, ...]."""
        parts = (part if layers is None else part[layers] for part in self.whole)
        found = Remainder(*(part[:, rows].transpose(0, 1) for part in parts))
        return self._turned(found, layers, back=True)

    def add(self, rows: Tensor, more: Remainder) -> None:
        """Merge what events have dropped, [E, L, Hkv, ...], into what their ``rows`` have."""
        self.used = True
        _add_remainders(self.whole, rows, self._turned(more, None, back=False))

    def begin(self, rows: Tensor) -> None:
        """New rows have lost nothing."""
        self.whole.bias.index_fill_(1, rows, -torch.inf)

    def move(self, to: Tensor, source: Tensor) -> None:
        """Put the rows ``source`` in the place of ``to``, all at once."""
        for part in self.whole:
            part[:, to] = part[:, source]

    def swap(self, moves: Iterable[RowMove], *, back: bool) -> None:
        """Copy remainders from rows to their places, or ``back``."""
        pairs = [(move.row, move.remainder) for move in moves if move.remainder != NO_PLACE]
        if pairs:
            rows, places = to_device(np.array(pairs).T, self.whole.bias.device)
            self.move(rows, places) if back else self.move(places, rows)
