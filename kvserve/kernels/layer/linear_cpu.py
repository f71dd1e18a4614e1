"""Matrix products on a CPU with weights in panels, and rows of such: calls ``linear.cpp``.

oneDNN, with weights packed for it, is as fast from 256 tokens on (with AMX up to 1.4 times as
fast), and slower for fewer (``bench.cpu_attention --part products``): its operator takes time to
start, does not read ahead, and cannot be recorded.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kvserve.kernels.build import load_library
from kvserve.kernels.calls import Compiled

DTYPES = (torch.float32, torch.bfloat16)

_WORTH_A_THREAD = 2**17  # multiplications, or numbers that are looked up
_PIECE = 2**22  # numbers that are rearranged at a time
_LINEAR, _TAKE_ROWS = Compiled("linear"), Compiled("take_rows", "linear")


P = TypeVar("P", bound="Panels")


class Panels(nn.Parameter):
    """A weight [outputs, inputs], laid out as [panels, inputs / E, width, E].

    E is 1 for float32 and 2 for bfloat16; the last panel is filled up with zeros.
    """

    inputs: int
    outputs: int

    @classmethod
    def of(cls: type[P], weight: Tensor) -> P:
        """``weight`` [outputs, inputs], dense, rearranged in its own memory.

        It is copied only if its last panel has to be filled up.
        """
        outputs, inputs = weight.shape
        each = 4 // weight.itemsize
        if weight.dtype not in DTYPES or inputs % each or not weight.is_contiguous():
            raise ValueError(
                f"weight {[outputs, inputs]} of {weight.dtype}: dense float32, or bfloat16 with an "
                "even number of inputs, is needed"
            )
        width, _ = panel_width()
        if outputs % width:
            weight = nn.functional.pad(weight, (0, 0, 0, -outputs % width))
        rows = weight.view(-1, width, inputs // each, each)
        values = weight.view(-1, inputs // each, width, each)
        some = max(1, _PIECE // rows[0].numel())
        for before, after in zip(rows.split(some), values.split(some), strict=True):
            turned = before.transpose(1, 2).clone(memory_format=torch.contiguous_format)
            after.copy_(turned)
        return cls._shaped(values, outputs, inputs)

    @classmethod
    def _shaped(cls: type[P], values: Tensor, outputs: int, inputs: int) -> P:
        panels = cls(values, requires_grad=False)
        panels.outputs, panels.inputs = outputs, inputs
        return panels

    def __deepcopy__(self, memo: dict[int, Any]) -> Panels:
        """A copy that knows its shape, which torch's own copy would lose."""
        if id(self) not in memo:
            memo[id(self)] = self._shaped(self.data.clone(), self.outputs, self.inputs)
        copied: Panels = memo[id(self)]
        return copied


class ExpertPanels(Panels):
    """Weights [experts, outputs, inputs], each expert's in panels of its own."""

    @property
    def experts(self) -> int:
        panels, width = self.shape[0], self.shape[2]
        return panels // -(-self.outputs // width)

    @classmethod
    def of(cls: type[P], weight: Tensor) -> P:
        """As ``Panels.of``, of all experts."""
        _, outputs, inputs = weight.shape
        width, _ = panel_width()
        if outputs % width:
            weight = nn.functional.pad(weight, (0, 0, 0, -outputs % width))
        every = Panels.of(weight.view(-1, inputs))
        return cls._shaped(every.data, outputs, inputs)


def panel_width() -> tuple[int, int]:
    """How many outputs lie side by side in a panel, and in a vector."""
    library = load_library("linear")
    return library.kvserve_panel_width(), library.kvserve_lanes()


def has_tiles() -> bool:
    """Whether bfloat16 is multiplied by AMX."""
    return bool(load_library("linear").kvserve_has_tiles())


def expert_linear(x: Tensor, panels: ExpertPanels, ends: Tensor) -> Tensor:
    """x: [N, inputs], sorted by expert; ends: int32 [experts], the last of which is N, where each
    expert's rows end -> [N, outputs]; a row does not depend on the others."""
    _check_rows(x, panels)
    return _multiply(x, panels, None, checked_ends(ends, panels.experts, len(x)), panels.experts)


def linear(x: Tensor, panels: Panels, bias: Tensor | None = None) -> Tensor:
    """x: [T, inputs], bias: [outputs] -> [T, outputs]; a row does not depend on the others."""
    _check_rows(x, panels)
    check_bias(bias, panels.outputs, x.dtype)
    return _multiply(x, panels, bias, None, 1)


def take_rows(panels: Panels, places: Tensor) -> Tensor:
    """places: int64 [T] -> those rows of the weight that lies in ``panels``, [T, inputs];
    ``IndexError`` for one that is not there."""
    if places.dtype is not torch.int64 or not places.is_contiguous():
        raise ValueError(f"take_rows: places of {places.dtype}, or not dense")
    out = torch.empty(len(places), panels.inputs, dtype=panels.dtype)
    threads = max(1, min(torch.get_num_threads(), out.numel() // _WORTH_A_THREAD))
    rows = panels.outputs
    sizes = len(places), rows, panels.shape[1], threads
    _TAKE_ROWS(panels, places, out, *sizes, refused=f"row {{}} of a table of {rows}")
    return out


def check_bias(bias: Tensor | None, outputs: int, dtype: torch.dtype) -> None:
    if bias is not None and not (
        bias.shape == (outputs,) and bias.dtype is dtype and bias.is_contiguous()
    ):
        raise ValueError(
            f"linear: bias {list(bias.shape)} of {bias.dtype}: {outputs} dense {dtype} are needed"
        )


def checked_ends(ends: Tensor, experts: int, rows: int) -> Tensor:
    """Where each expert's rows end, dense."""
    if ends.shape != (experts,) or ends.dtype is not torch.int32:
        raise ValueError(f"expert_linear: ends {list(ends.shape)} of {ends.dtype}")
    bounds = ends.diff(prepend=ends.new_zeros(1))
    if int(ends[-1]) != rows or bool((bounds < 0).any()):
        raise ValueError(f"expert_linear: ends {ends.tolist()} do not divide {rows} rows")
    return ends.contiguous()


def _check_rows(x: Tensor, panels: Panels) -> None:
    if x.shape[1] != panels.inputs or x.stride(1) != 1 or x.dtype is not panels.dtype:
        raise ValueError(
            f"linear: x {list(x.shape)} of {x.dtype} does not fit a weight "
            f"{[panels.outputs, panels.inputs]} of {panels.dtype}, or its rows are not dense"
        )


def _multiply(
    x: Tensor, panels: Panels, bias: Tensor | None, ends: Tensor | None, experts: int
) -> Tensor:
    tokens, inputs, outputs = x.shape[0], panels.inputs, panels.outputs
    y = torch.empty(tokens, outputs, dtype=x.dtype)
    threads = min(torch.get_num_threads(), tokens * inputs * outputs // _WORTH_A_THREAD)
    sizes = tokens, inputs, outputs, x.stride(0), experts
    _LINEAR(x, panels, bias, y, ends, *sizes, x.dtype is torch.bfloat16, max(1, threads))
    return y
