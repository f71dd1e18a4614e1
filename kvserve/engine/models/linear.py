"""Matrix products: plain, over FP8, or over weights that are laid out for this CPU.

On a CPU ``F.linear`` is MKL's for float32, which does not use AVX512 on AMD CPUs. For bfloat16 it
is oneDNN's, but reorders the weights in each call. So weights are laid out once: in panels for the
compiled product, or packed for oneDNN if that is not there, or lacks AMX where the CPU has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.device.pages import use_large_pages
from kvserve.engine.models.fp8 import multiply
from kvserve.kernels.cpu import linear as compiled
from kvserve.kernels.cpu.build import why_missing


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """x: [T, in], weight: [out, in], packed or not -> [T, out]. FP8 weights have ``scales``."""
    if isinstance(weight, compiled.Panels):
        return compiled.linear(x, weight, bias)
    if scales is not None:
        product = multiply(x, weight, scales)
        return product if bias is None else product + bias
    if weight.is_mkldnn:
        # The operator that inductor calls for frozen CPU weights; there is no public one that
        # takes plain activations.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def expert_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x: [N, in], sorted by expert, each expert's rows up to its ``ends`` (int32 [E]); weight: [E,
    out, in], in panels or not -> [N, out]."""
    if isinstance(weight, compiled.ExpertPanels):
        return compiled.expert_linear(x, weight, ends)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


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


def packed(weight: nn.Parameter, product: str) -> nn.Parameter:
    """The weight [out, in], or [experts, out, in], as ``product`` wants it, in place if possible.

    The plain weight is gone afterwards, and ``linear`` is all that can use the packed one.
    """
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
