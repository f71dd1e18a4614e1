"""How keys or values may be held."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from kvserve.kernels.store.few_bits import FewHeads, FewVectors
    from kvserve.kernels.store.quantized_entries import QuantizedVectors

Entries: TypeAlias = "Tensor | QuantizedVectors | FewVectors"
"""Keys or values [num_blocks, B, Hb, D]: numbers, or levels of them."""
AnyEntries: TypeAlias = "Entries | FewHeads"
"""Or levels whose bits differ by head."""
