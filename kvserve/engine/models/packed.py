"""Weights in whole numbers of 4 or 8 bits, or FP8, as AWQ, GPTQ, compressed-tensors and others
store them.

They are levels and scales, which are held as they are stored where there is a product for them
(``held.py``), and else widened as they are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.engine.models.checkpoint import Checkpoint
from kvserve.engine.models.storage import LevelPiece, StoredLevels, first_number, level_rows
from kvserve.kernels.layer.weight_levels import LevelForm
from kvserve.log import ConfigError

_TYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Packed(StoredLevels):
    """Levels of ``bits``, in groups of ``group`` inputs (0: of all), in tensors whose names end as
    ``levels``, ``scales``, ``zeros`` and ``order`` (the group of each input). ``rows`` outputs
    share their scales; the last ones may be fewer.

    ``turned``: they are [inputs, outputs] and [groups, outputs], else the other way round.
    ``shifts``: where each of the numbers is that share an int32: along ``packed``, ``"inputs"`` or
    ``"outputs"``; zeros share it along outputs. Zeros count ``zeros_from``; without them, that of
    unsigned levels is in their middle. ``by_token``: the checkpoint wants activations rounded, at
    scales found at run time.
    """

    bits: int
    group: int
    levels_at: str
    scales_at: str
    zeros_at: str = ""
    order_at: str = ""
    shape_at: str = ""
    symmetric: bool = True
    turned: bool = False
    packed: str = ""
    shifts: tuple[int, ...] = ()
    zeros_from: int = 0
    e4m3: bool = False
    by_token: bool = False
    rows: int = 1

    def parts(self, name: str) -> tuple[str, ...]:
        """The first is that of the levels."""
        ends = self.levels_at, self.scales_at, self.zeros_at, self.order_at, self.shape_at
        return tuple(name.removesuffix("weight") + end for end in ends if end)

    def fits(self, checkpoint: Checkpoint, name: str) -> bool:
        """Whether the weight is stored so, and not as another form with tensors of these names."""
        stored, scales = (self._name(name, end) for end in (self.levels_at, self.scales_at))
        if not self.packed:
            wanted = torch.float8_e4m3fn if self.e4m3 else torch.int8
            return first_number(checkpoint, stored).dtype is wanted
        inputs = self.shape(checkpoint, name)[1]
        words = checkpoint.shape(stored)[0 if self.turned else 1]
        counts = checkpoint.shape(scales)[0 if self.turned else 1]
        if self.packed == "inputs" and words != -(-inputs // len(self.shifts)):
            return False
        if self.order_at and checkpoint.shape(self._name(name, self.order_at)) != (inputs,):
            return False
        others = ("weight_zero_point", "weight_g_idx") if self.shape_at else ("g_idx",)
        absent = [end for end in others if end not in (self.zeros_at, self.order_at)]
        more = any(self._name(name, end) in checkpoint.names for end in absent)
        return counts == -(-inputs // (self.group or inputs)) and not more

    def shape(self, checkpoint: Checkpoint, name: str) -> tuple[int, ...]:
        if self.shape_at:
            outputs, inputs = checkpoint.tensor(self._name(name, self.shape_at)).tolist()
            return outputs, inputs
        inputs, outputs = checkpoint.shape(self.parts(name)[0])[:: 1 if self.turned else -1]
        each = len(self.shifts) or 1
        if self.packed == "inputs":
            return outputs, inputs * each
        return outputs * (each if self.packed else 1), inputs

    def form(self, checkpoint: Checkpoint | None, name: str) -> LevelForm:
        """Without a checkpoint, as most of this kind are, and for no certain width."""
        scales, group = torch.float32 if self.e4m3 else torch.float16, self.group
        if checkpoint is not None:
            found = checkpoint.tensor(self._name(name, self.scales_at)).dtype
            scales = found if found in _TYPES and not self.e4m3 else torch.float32
            group = group or self.shape(checkpoint, name)[1]
        rounds = self.by_token and not self.e4m3
        lowest = -8 if self.bits == 4 else 0
        offsets = "" if self.symmetric else "zero"
        return LevelForm(self.bits, group, scales, lowest, offsets, self.e4m3, rounds)

    def groups(self, checkpoint: Checkpoint, name: str) -> Tensor:
        if not self.order_at:
            return super().groups(checkpoint, name)
        return checkpoint.tensor(self._name(name, self.order_at)).long()

    def levels(
        self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice
    ) -> Iterator[LevelPiece]:
        scales, offsets = self._scales(checkpoint, name)
        for part in level_rows(rows, columns.stop - columns.start):
            levels = self._levels(checkpoint, name, part, columns)
            yield LevelPiece(part, levels, scales[part], None if offsets is None else offsets[part])

    def _name(self, name: str, end: str) -> str:
        return name.removesuffix("weight") + end

    def _scales(self, checkpoint: Checkpoint, name: str) -> tuple[Tensor, Tensor | None]:
        """[outputs, groups] both; outputs that share scales have copies."""
        where = self._name(name, self.scales_at)
        outputs, inputs = self.shape(checkpoint, name)
        shape = -(-outputs // self.rows), -(-inputs // (self.group or inputs))
        scales = self._by_output(checkpoint.tensor(where))
        if not scales.is_floating_point() or scales.itemsize < 2:
            raise ConfigError(
                f"--model: {where} in {checkpoint.file(where)} is {str(scales.dtype)[6:]}, of "
                "which kvserve reads no scales"
            )
        if scales.numel() == 1 and (self.rows == 1 or shape == (1, 1)):
            scales = scales.view(1, 1).expand(shape)
        if scales.numel() == outputs and shape == (outputs, 1):
            scales = scales.reshape(outputs, 1)
        zeros = None
        if self.zeros_at:
            stored = checkpoint.tensor(self._name(name, self.zeros_at))
            zeros = self._by_output(_unpacked(stored, int(self.turned), self.shifts))[:outputs]
        if scales.shape != shape or (zeros is not None and zeros.shape != scales.shape):
            blocks = f"blocks of {self.rows} x {self.group}" if self.rows > 1 else ""
            raise ConfigError(
                f"--model: {where} in {checkpoint.file(where)} has shape "
                f"{tuple(checkpoint.shape(where))} for a weight of {(outputs, inputs)} in "
                f"{blocks or f'groups of {self.group or inputs}'}, or its zeros do not fit; fetch "
                "it again"
            )
        if self.rows > 1:
            scales = scales.repeat_interleave(self.rows, dim=0)[:outputs]
        if zeros is None:
            return scales, None
        offsets = zeros.int() + self.zeros_from - 2 ** (self.bits - 1)
        if not self.symmetric:
            return scales, offsets.float()
        if offsets.any():
            raise ConfigError(
                f"--model: {self._name(name, self.zeros_at)} in {checkpoint.file(where)} has other "
                "zeros than config.json's symmetric levels have; set sym to false there"
            )
        return scales, None

    def _by_output(self, stored: Tensor) -> Tensor:
        return stored.T if self.turned and stored.dim() == 2 else stored

    def _levels(self, checkpoint: Checkpoint, name: str, rows: slice, columns: slice) -> Tensor:
        """[rows, columns], bytes."""
        stored, each = self.parts(name)[0], len(self.shifts) or 1
        wanted = {"outputs": rows, "inputs": columns}
        ways = ("inputs", "outputs") if self.turned else ("outputs", "inputs")
        words = {
            way: slice(part.start // each, -(-part.stop // each)) if way == self.packed else part
            for way, part in wanted.items()
        }
        region = tuple(words[way] for way in ways)
        ((_, values),) = checkpoint.pieces(stored, region[0].stop - region[0].start, region)
        if self.packed:
            values = _unpacked(values, ways.index(self.packed), self.shifts)
            first = wanted[self.packed].start - words[self.packed].start * each
            size = wanted[self.packed].stop - wanted[self.packed].start
            values = values.narrow(ways.index(self.packed), first, size)
            if self.bits == 8:
                values = (values ^ 128).view(torch.int8)
        elif values.dtype is not (torch.float8_e4m3fn if self.e4m3 else torch.int8):
            raise ConfigError(
                f"--model: {stored} in {checkpoint.file(stored)} is {str(values.dtype)[6:]} beside "
                f"a scale; it should be {'float8_e4m3fn' if self.e4m3 else 'int8'}"
            )
        return (values.T if self.turned else values).contiguous()


def _unpacked(words: Tensor, dim: int, shifts: tuple[int, ...]) -> Tensor:
    """int32 [a, b] -> uint8, with as many numbers as ``shifts`` for each word along ``dim``."""
    mask = 2 ** (32 // len(shifts)) - 1
    each = [(words >> shift).bitwise_and_(mask).to(torch.uint8) for shift in shifts]
    return torch.stack(each, dim + 1).flatten(dim, dim + 1)
