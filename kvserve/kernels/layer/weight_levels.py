"""Weights held as levels: whole numbers of 4 or 8 bits or e4m3, and scales for groups of inputs.

A weight is ``level * scale``, ``(level - zero) * scale`` or ``level * scale + minimum``. The levels
of an output lie side by side, two of 4 bits in a byte: in each 32 inputs, number j below number j +
16. Kernels for a CPU lay them out anew (``weight_levels_cpu.py``), those for a GPU do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

BLOCK = 32
"""Inputs whose 4-bit levels are paired."""
_PIECE = 2**22  # weights that are unpacked at a time


@dataclass(frozen=True)
class LevelForm:
    """``group`` inputs share a scale of type ``scales``. 4 bits count from ``lowest``; 8 bits are
    signed, or e4m3. ``offsets``: each group also has a ``"zero"``, which is subtracted from its
    levels, or a ``"minimum"``, which is added to its weights. ``rounds``: x is to be rounded to
    such 8 bits too, at a scale of each token."""

    bits: int
    group: int
    scales: torch.dtype = torch.float16
    lowest: int = 0
    offsets: str = ""
    e4m3: bool = False
    rounds: bool = False

    @property
    def name(self) -> str:
        """For the start-up table."""
        return "FP8" if self.e4m3 else f"{self.bits} bits"


class Levels(nn.Module):
    """A weight [outputs, inputs], or [experts, outputs, inputs]: ``levels`` uint8 [.., outputs,
    bytes], ``scales`` and ``offsets`` [.., outputs, groups].

    ``order`` int32 [.., inputs]: the number of x that each input is, -1 for none; without it, x has
    as many numbers as there are inputs, or fewer. ``width`` is that of x, ``dtype`` its type.
    """

    def __init__(
        self,
        form: LevelForm,
        width: int,
        levels: Tensor,
        scales: Tensor,
        offsets: Tensor | None = None,
        order: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.form, self.width = form, width
        self.dtype = dtype or torch.get_default_dtype()
        self.levels, self.scales = _as_parameter(levels), _as_parameter(scales)
        self.offsets = None if offsets is None else _as_parameter(offsets)
        self.order = None if order is None else _as_parameter(order.to(levels.device))

    @classmethod
    def empty(
        cls, form: LevelForm, shape: Sequence[int], inputs: int, order: Tensor | None = None
    ) -> Levels:
        """For a weight of ``shape`` [.., outputs, width], whose ``inputs`` have been arranged."""
        *outputs, width = shape
        levels = torch.empty(*outputs, inputs * form.bits // 8, dtype=torch.uint8)
        scales = torch.empty(*outputs, -(-inputs // form.group), dtype=form.scales)
        offsets = torch.empty_like(scales) if form.offsets else None
        return cls(form, width, levels, scales, offsets, order)

    @property
    def inputs(self) -> int:
        """Inputs whose levels are held, of which some may be of no number of x."""
        return self.levels.shape[-1] * 8 // self.form.bits

    @property
    def shape(self) -> torch.Size:
        """That of the weight."""
        return torch.Size([*self.levels.shape[:-1], self.width])

    @property
    def device(self) -> torch.device:
        return self.levels.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parameters())

    def __getitem__(self, index: int | slice) -> Levels:
        """One expert, or some of the rows: the same memory."""
        one = isinstance(index, int) and self.order is not None
        return Levels(
            self.form,
            self.width,
            self.levels.data[index],
            self.scales.data[index],
            None if self.offsets is None else self.offsets.data[index],
            self.order.data[index] if one and self.order is not None else self.order,
            self.dtype,
        )

    def split(self, sizes: Sequence[int]) -> list[Levels]:
        """Rows, one part behind the other: the same memory."""
        ends = torch.tensor(sizes).cumsum(0).tolist()
        return [self[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def chunk(self, count: int) -> list[Levels]:
        """As ``split``, all equal."""
        return self.split([self.shape[0] // count] * count)

    def narrow(self, dim: int, start: int, length: int) -> Levels:
        """Some rows, or all inputs, which have been divided when they were arranged."""
        return self[start : start + length] if dim == 0 else self

    def write(
        self, rows: slice | Tensor, levels: Tensor, scales: Tensor, offsets: Tensor | None
    ) -> None:
        """Store some rows: levels [R, inputs], bytes; of 4 bits, those from 0 to 15."""
        packed = levels.view(torch.uint8)
        if self.form.bits == 4:
            low, high = packed.unflatten(-1, (-1, 2, BLOCK // 2)).unbind(2)
            packed = (low | high << 4).flatten(1)
        self.levels[rows] = packed.to(self.device)
        self.scales[rows] = scales.to(self.device, self.form.scales)
        if self.offsets is not None and offsets is not None:
            self.offsets[rows] = offsets.to(self.device, self.form.scales)

    def numbers(self, rows: slice | Tensor) -> Tensor:
        """float32 [R, width] of some rows (and of one expert): what they stand for."""
        groups = torch.arange(self.inputs, device=self.device) // self.form.group
        levels = unpacked(self.levels.data[rows], self.form)
        offsets = None if self.offsets is None else self.offsets[rows]
        numbers = widened(self.form, levels, self.scales[rows], offsets, groups)
        if self.order is None:
            return numbers[:, : self.width]
        real = self.order >= 0
        whole = numbers.new_zeros(len(numbers), self.width)
        return whole.index_copy_(1, self.order[real].long(), numbers[:, real])


def widened(
    form: LevelForm, levels: Tensor, scales: Tensor, offsets: Tensor | None, groups: Tensor
) -> Tensor:
    """levels [R, inputs], a byte each; scales and offsets [R, G]; groups int64 [inputs], that of
    each input -> float32 [R, inputs]."""
    if form.e4m3:
        numbers = levels.view(torch.float8_e4m3fn).float()
    else:
        numbers = levels.view(torch.uint8 if form.bits == 4 else torch.int8).float() + form.lowest
    if offsets is not None and form.offsets == "zero":
        numbers -= offsets.float()[:, groups]
    numbers *= scales.float()[:, groups]
    if offsets is not None and form.offsets == "minimum":
        numbers += offsets.float()[:, groups]
    return numbers


def unpacked(levels: Tensor, form: LevelForm) -> Tensor:
    """uint8 [.., bytes] -> [.., inputs]."""
    if form.bits == 8:
        return levels
    levels = levels.unflatten(-1, (-1, BLOCK // 2))
    return torch.stack([levels & 15, levels >> 4], dim=-2).flatten(-3)


def linear_levels(x: Tensor, weight: Levels, bias: Tensor | None = None) -> Tensor:
    """x: [T, width] -> [T, outputs], in float32 throughout: the reference of every kernel."""
    wide = rounded(x) if weight.form.rounds else x.float()
    product = wide @ weight.numbers(slice(None)).T
    return (product if bias is None else product + bias).to(x.dtype)


def expert_linear_levels(x: Tensor, weight: Levels, ends: Tensor) -> Tensor:
    """x: [N, width], sorted by expert, each expert's rows up to its ``ends`` (int32 [E]) -> [N,
    outputs]: the reference, as ``linear_levels``."""
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = x.split(sizes)
    return torch.cat([linear_levels(part, weight[i]) for i, part in enumerate(parts)])


def rounded(x: Tensor) -> Tensor:
    """x: [T, width], in float32 as it is once each row was rounded to 8 bits, as compressed-tensors
    does it: 127.5 is a row's largest number."""
    levels, steps = levels_of_rows(x)
    return levels * steps


def levels_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers from -128 to 127 in float32, and the step [T, 1] of each row."""
    steps = x.float().abs().amax(-1, keepdim=True) / 127.5
    steps = steps.masked_fill(steps == 0, 1.0)
    return (x.float() / steps).round().clamp(-128, 127), steps


def _as_parameter(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
