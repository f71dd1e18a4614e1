"""The shape of the paged cache: one pool of equal blocks, whatever a policy's granularity.

A block table constrains how many entries a row holds, not which tokens they are, so granularity is
about lengths alone. Letters: L layers, Hkv KV heads, D head dim, B tokens per block, LG layer
groups, R rows per sequence, G = LG * R KV groups.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Granularity(enum.Enum):
    """Which lengths may differ: none (MODEL), by layer (LAYER), by layer and KV head (HEAD)."""

    MODEL = "model"
    LAYER = "layer"
    HEAD = "head"

    def fits(self, layout: Granularity) -> bool:
        """Whether lengths that differ like this can be held in a layout: its own or a finer one."""
        order = list(Granularity)
        return order.index(self) <= order.index(layout)


@dataclass(frozen=True)
class WindowShape:
    """How layers with windows lie in the pool's blocks, if their heads are of another number or
    size: ``layers_per_block`` of them share one, with ``heads_per_block`` heads of ``head_dim``
    each; a row has ``rows`` tables in each such group of layers."""

    layers_per_block: int
    rows: int
    heads_per_block: int
    head_dim: int


@dataclass(frozen=True)
class LayerKinds:
    """A model's ``count`` layers: those in ``windowed`` see the newest tokens alone, the others all
    of them. Each kind counts its own; a model may have but one kind."""

    count: int
    windowed: frozenset[int] = frozenset()

    @cached_property
    def full(self) -> tuple[int, ...]:
        """The layers that see all tokens."""
        return tuple(layer for layer in range(self.count) if layer not in self.windowed)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Each layer's number among those of its kind."""
        kinds = [layer in self.windowed for layer in range(self.count)]
        return tuple(kinds[:layer].count(kind) for layer, kind in enumerate(kinds))


class LayerState(NamedTuple):
    """What one layer keeps of a row: a convolution's newest inputs ``[channels, columns]`` in the
    model's dtype, and a recurrent state of any shape in float32 (``None``: it has none)."""

    layer: int
    tail: tuple[int, int]
    recurrent: tuple[int, ...] | None

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of a row, of numbers of ``itemsize`` bytes in the model's dtype."""
        return itemsize * math.prod(self.tail) + 4 * math.prod(self.recurrent or (0,))


@dataclass(frozen=True)
class KVLayout:
    """All cache shapes derive from these five numbers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    granularity: Granularity = Granularity.MODEL
    holds_entries: bool = True
    """Whether these layers are of the kind that sees all tokens; else rows hold nothing in them."""
    windows: WindowShape | None = None
    """The shape of the model's layers with windows, unless their heads are as these layers'."""

    @cached_property
    def layer_groups(self) -> int:
        """LG: groups of layers that share tables."""
        return 1 if self.granularity is Granularity.MODEL else self.num_layers

    @cached_property
    def rows(self) -> int:
        """R: rows (tables) a sequence has in each layer group."""
        return self.num_kv_heads if self.granularity is Granularity.HEAD else 1

    @cached_property
    def groups(self) -> int:
        """G: KV groups of one sequence, each with its own length."""
        return self.layer_groups * self.rows

    @cached_property
    def layers_per_block(self) -> int:
        return self.num_layers // self.layer_groups

    @cached_property
    def heads_per_block(self) -> int:
        return self.num_kv_heads // self.rows

    def cache_shape(self, num_blocks: int) -> tuple[int, ...]:
        """``[num_blocks, L/LG, 2, B, Hkv/R, D]``, block-major: a block is one byte range."""
        # Keys are stored after RoPE, and attention does not depend on order: slot j of one head and
        # slot j of another may hold different tokens.
        entry = self.heads_per_block, self.head_dim
        return num_blocks, self.layers_per_block, 2, self.block_size, *entry

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` in every group of one sequence."""
        return -(-num_tokens // self.block_size) * self.groups * self.holds_entries
