"""Matrix products on a CPU with weights held as levels: calls ``linear_levels.cpp``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kvserve.kernels.build import load_library
from kvserve.kernels.calls import Compiled
from kvserve.kernels.layer.linear_cpu import _WORTH_A_THREAD, check_bias, checked_ends, panel_width
from kvserve.kernels.layer.weight_levels import LevelForm, Levels, unpacked

DTYPES = (torch.float32, torch.bfloat16)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_PIECE = 2**22  # weights that are rearranged at a time
_LINEAR, _TAKE_ROWS = (Compiled(name, "linear_levels") for name in ("linear_levels", "take_levels"))


class LevelPanels(Levels):
    """``Levels`` whose outputs lie in panels; ``weight`` is used up. What a product and
    ``take_rows`` need is all that is left of it.

    ``levels`` uint8 [panels, bytes] in the order of the C++ file, ``scales`` and ``offsets``
    [panels, groups, width]. The last panel is filled up with zeros.
    """

    def __init__(self, weight: Levels) -> None:
        levels = _panels(weight.levels.data, weight.form, weight.dtype)
        offsets = None if weight.offsets is None else _by_panel(weight.offsets.data)
        scales = _by_panel(weight.scales.data)
        order = None if weight.order is None else weight.order.data
        super().__init__(weight.form, weight.width, levels, scales, offsets, order, weight.dtype)
        self._inputs, self._shape = weight.inputs, weight.shape
        self.experts = len(weight.levels) if weight.levels.dim() == 3 else 1

    @property
    def inputs(self) -> int:
        return self._inputs

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def outputs(self) -> int:
        """Of each expert."""
        return self._shape[-2]

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [T, width], bias: [outputs] -> [T, outputs]; a row does not depend on the others."""
        check_bias(bias, self.outputs, x.dtype)
        return self._multiply(x, bias, None)

    def expert_linear(self, x: Tensor, ends: Tensor) -> Tensor:
        """x: [N, width], sorted by expert; ends: int32 [experts], the last of which is N, where
        each expert's rows end -> [N, outputs]."""
        return self._multiply(x, None, checked_ends(ends, self.experts, len(x)))

    def take_rows(self, places: Tensor) -> Tensor:
        """places: int64 [T] -> those rows, [T, inputs]; ``IndexError`` for one that is not
        there."""
        out = torch.empty(len(places), self.inputs, dtype=self.dtype)
        sizes = len(places), self.outputs, self.inputs, self.form.group
        _TAKE_ROWS(
            *(self.levels, self.scales, self.offsets, places, out, *sizes, *self._kind()),
            refused=f"row {{}} of a table of {self.outputs}",
        )
        return out

    def _multiply(self, x: Tensor, bias: Tensor | None, ends: Tensor | None) -> Tensor:
        if x.shape[1] != self.width or x.stride(1) != 1 or x.dtype is not self.dtype:
            raise ValueError(
                f"linear: x {list(x.shape)} of {x.dtype} does not fit levels {list(self.shape)} "
                f"for {self.dtype}, or its rows are not dense"
            )
        y = torch.empty(len(x), self.outputs, dtype=x.dtype)
        threads = min(torch.get_num_threads(), y.numel() * self.inputs // _WORTH_A_THREAD)
        held = self.levels, self.scales, self.offsets
        sizes = len(x), self.width, self.inputs, self.outputs, x.stride(0)
        is_bf16, *kind = self._kind()
        how = self.form.group, self.experts, is_bf16, *kind, self.form.rounds, max(1, threads)
        _LINEAR(x, *held, bias, y, ends, self.order, *sizes, *how)
        return y

    def _kind(self) -> tuple[int, int, int, int, int]:
        form = self.form
        code = 2 if form.e4m3 else int(form.bits == 8)
        zeros = form.offsets == "zero"
        scales = _SCALES.index(form.scales)
        return self.dtype is torch.bfloat16, code, form.lowest, scales, zeros


def _panels(levels: Tensor, form: LevelForm, dtype: torch.dtype) -> Tensor:
    """[.., outputs, bytes] -> [panels, inputs' steps, bytes of a step], in the same memory unless
    the last panel has to be filled up."""
    width, lanes = panel_width()
    missing, size = -levels.shape[-2] % width, levels.shape[-1]
    if missing:
        levels = nn.functional.pad(levels, (0, 0, 0, missing))
    rows = levels.view(-1, width, size)
    laid = rows.view(len(rows), -1)
    for some in range(0, len(rows), step := max(1, _PIECE // (2 * width * size))):
        part = slice(some, some + step)
        laid[part] = _as_kernels_read(unpacked(rows[part], form), form, lanes, dtype).flatten(1)
    return laid


def _as_kernels_read(levels: Tensor, form: LevelForm, lanes: int, dtype: torch.dtype) -> Tensor:
    """[panels, width, inputs] -> as the kernel reads them."""
    count, width, inputs = levels.shape
    vectors = width // lanes
    if form.bits == 8:
        each = load_library("linear_levels").kvserve_inputs_side_by_side(dtype is torch.bfloat16)
        return levels.view(count, width, inputs // each, each).transpose(1, 2).contiguous()
    # Digit n of a lane's 32 bits is that of vector n % V and input n / V of the step.
    steps = levels.view(count, vectors, lanes, -1, 8 // vectors).permute(0, 3, 2, 4, 1)
    low, high = steps.flatten(-2).unflatten(-1, (4, 2)).unbind(-1)
    return low | high << 4


def _by_panel(scales: Tensor) -> Tensor:
    """[.., outputs, groups] -> [panels, groups, width]."""
    width, _ = panel_width()
    scales = nn.functional.pad(scales, (0, 0, 0, -scales.shape[-2] % width))
    return scales.view(-1, width, scales.shape[-1]).transpose(1, 2).contiguous()
