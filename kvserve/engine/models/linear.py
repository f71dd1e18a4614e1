"""Matrix products: over numbers, over levels, or over either as it is laid out for this CPU.

On a CPU ``F.linear`` is MKL's for float32, which does not use AVX512 on AMD CPUs. For bfloat16 it
is oneDNN's, but reorders the weights in each call. So weights are laid out once: in panels for the
compiled product, or packed for oneDNN if that is not there, or lacks AMX where the CPU has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.device.pages import use_large_pages
from kvserve.kernels.build import why_missing
from kvserve.kernels.layer import linear_cpu as compiled
from kvserve.late import LateModule

if TYPE_CHECKING:
    from kvserve.kernels.layer.weight_levels import LevelForm, Levels

_levels = LateModule("engine.models.level_products")
Weight: TypeAlias = "nn.Parameter | Levels"
"""A matrix [out, in], or [experts, out, in], of numbers or levels, maybe laid out for a product."""


@dataclass(frozen=True, eq=False)
class Hold:
    """How a matrix is held: ``form``, ``inputs`` and ``order`` are those of ``Levels``."""

    form: LevelForm
    inputs: int
    order: Tensor | None = None


@dataclass(frozen=True)
class Holding:
    """Which matrices of a decoder are levels, by name; and how many are widened, by reason."""

    matrices: Mapping[str, Hold] = field(default_factory=dict)
    widened: Mapping[str, int] = field(default_factory=dict)

    def matrix(self, name: str, *shape: int, layer: int | None = None) -> Weight:
        """A new one, which is read later."""
        hold = self.matrices.get(name if layer is None else f"layers.{layer}.{name}")
        if hold is None:
            return nn.Parameter(torch.empty(*shape), requires_grad=False)
        return _levels.empty(hold, shape)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x: [T, in], weight: [out, in], laid out or not -> [T, out]."""
    if isinstance(weight, compiled.Panels):
        return compiled.linear(x, weight, bias)
    if not isinstance(weight, Tensor):
        return _levels.linear(x, weight, bias)
    if weight.is_mkldnn:
        # The operator that inductor calls for frozen CPU weights; there is no public one that
        # takes plain activations.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def expert_linear(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """x: [N, in], sorted by expert, each expert's rows up to its ``ends`` (int32 [E]); weight: [E,
    out, in], laid out or not -> [N, out]."""
    if isinstance(weight, compiled.ExpertPanels):
        return compiled.expert_linear(x, weight, ends)
    if not isinstance(weight, Tensor):
        return _levels.expert_linear(x, weight, ends)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def take_rows(table: Weight, places: Tensor, of_numbers: Callable[..., Tensor]) -> Tensor:
    """table: [N, W], laid out or not, places: int64 [T] -> its rows there, [T, W]; ``of_numbers``
    looks them up in plain numbers."""
    if isinstance(table, compiled.Panels):
        return compiled.take_rows(table, places)
    if not isinstance(table, Tensor):
        return _levels.take_rows(table, places)
    return of_numbers(table, places)


def select_product(dtype: torch.dtype, device: str) -> tuple[str, str]:
    """Which product to use, ``"compiled"``, ``"oneDNN"`` or ``"torch"``, and why."""
    if device != "cpu" or dtype not in compiled.DTYPES:
        return "torch", "weights are laid out anew for float32 and bfloat16 on a CPU alone"
    bf16 = dtype == torch.bfloat16
    packs = torch.backends.mkldnn.is_available()
    packs = packs and (not bf16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    missing = why_missing("linear")
    tiles = bf16 and missing is None and compiled.has_tiles()
    if packs and bf16 and not tiles and torch.cpu._is_amx_tile_supported():
        return "oneDNN", "multiplies bfloat16 with AMX, the compiled product does not"
    if missing is None:
        by = ", multiplied by AMX" if tiles else ""
        return "compiled", f"weights lie in panels for this CPU{by}"
    return ("oneDNN" if packs else "torch"), f"compiled products are not there: {missing}"


def packed(weight: Weight, product: str) -> Weight:
    """The weight [out, in], or [experts, out, in], as ``product`` wants it, in place if possible.

    The plain weight is gone afterwards (but for oneDNN), and ``linear`` is all that can use the
    packed one; ``take_rows`` too, unless it is oneDNN's.
    """
    if not isinstance(weight, Tensor):
        return _levels.packed(weight, product)
    odd, experts = weight.shape[-1] % (4 // weight.itemsize), weight.dim() == 3
    if product == "torch" or (product == "compiled" and odd) or (product == "oneDNN" and experts):
        return weight
    if product == "compiled":
        kind = compiled.ExpertPanels if experts else compiled.Panels
        panels = kind.of(weight.data)
        use_large_pages(panels.data_ptr(), panels.nbytes)
        return panels
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
    use_large_pages(torch.ops.mkldnn.data_ptr(reordered), torch.ops.mkldnn._nbytes(reordered))
    return nn.Parameter(reordered, requires_grad=False)
