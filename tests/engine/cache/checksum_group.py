"""A cache group that only tests have: one number of every token, in every second layer.

The number is the sum of the token's key. In layer 0 it depends on the token and its position alone,
whatever has been evicted. This file is all that a group takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.row_groups import KINDS, RowGroup
from kvserve.engine.models.transformer import Transformer
from kvserve.scheduler.blocks.cache_group import FURTHER, GroupSpec
from kvserve.scheduler.layout import KVLayout

wanted = False
"""Whether engines that are built have this group."""


@dataclass(frozen=True)
class ChecksumSpec(GroupSpec):
    """Numbers of as many tokens as a block of keys and values has; the rest of it is padding."""


class ChecksumRows(RowGroup):
    """``numbers [num_blocks, tokens, layers]`` of the layers 0, 2, ..."""

    spec_type = ChecksumSpec
    writes = True

    def attach(self, cache: KVCache, model: Transformer, max_len: int) -> None:
        tokens, layers = self.spec.block_tokens, -(-cache.layout.num_layers // 2)
        memory = cache.kv.flatten(1).view(torch.float32)
        self.numbers = memory[:, : tokens * layers].unflatten(1, (tokens, layers))

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        if layer % 2 == 0:
            block, place = (
                slots[0, 0] // self.spec.block_tokens,
                slots[0, 0] % self.spec.block_tokens,
            )
            self.numbers[block, place, layer // 2] = k.float().sum((1, 2))

    def of_row(self, row: int, num_tokens: int) -> Tensor:
        """[num_tokens, layers]"""
        at = torch.arange(num_tokens)
        blocks = self.tables[0][0, row, 0][at // self.spec.block_tokens]
        return self.numbers[blocks.long(), at % self.spec.block_tokens]


def _spec_of(layout: KVLayout, block_bytes: int) -> GroupSpec | None:
    return ChecksumSpec(layout.block_size) if wanted else None


KINDS.append(ChecksumRows)
FURTHER.append(_spec_of)
