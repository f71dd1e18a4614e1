"""GGUF's types that are held as they are stored: Q4_0, Q4_1 and Q8_0, in blocks of 32 weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Blocks, Checkpoint
from kvserve.engine.models.storage import LevelPiece, StoredLevels, level_rows
from kvserve.kernels.weight_levels import LevelForm

_BLOCK = 32
FORMS = {
    "Q4_0": LevelForm(4, _BLOCK, lowest=-8),
    "Q4_1": LevelForm(4, _BLOCK, offsets="minimum"),
    "Q8_0": LevelForm(8, _BLOCK),
}
"""By GGUF's name of the type."""


class GgufLevels(StoredLevels):
    """A block has its scale, in Q4_1 its minimum, and its levels: of 4 bits, number j is below
    number j + 16 in a byte (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h)."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def parts(self, name: str) -> tuple[str, ...]:
        return (name,)

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        return checkpoint.shape(name)

    def form(self, checkpoint: Checkpoint, name: str) -> LevelForm:
        return FORMS[self._blocks.kind(name)]

    def levels(
        self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice
    ) -> Iterator[LevelPiece]:
        form = self.form(checkpoint, name)
        numbers = 2 if form.offsets else 1
        for part in level_rows(rows, self.shape(checkpoint, name)[1]):
            stored = torch.from_numpy(self._blocks.blocks(name, part))
            blocks = stored.unflatten(1, (-1, 2 * numbers + 4 * form.bits))
            head, levels = blocks.split([2 * numbers, 4 * form.bits], dim=-1)
            scales: Tensor = head.contiguous().view(torch.float16)
            if form.bits == 4:
                levels = torch.cat([levels & 15, levels >> 4], dim=-1)
            levels = levels.flatten(1)[:, columns]
            offsets = scales[..., 1] if form.offsets else None
            yield LevelPiece(part, levels.contiguous(), scales[..., 0], offsets)
