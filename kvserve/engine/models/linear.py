"""Matrix products: plain, over FP8, or over weights that oneDNN has packed for this CPU.

``F.linear`` is MKL's for float32, and on AMD CPUs MKL takes its AVX2 path, at less than half of
oneDNN's speed with AVX512. For bfloat16 it is oneDNN's, but reorders the weights in each call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kvserve.engine.memory import use_large_pages
from kvserve.engine.models.fp8 import multiply


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scales: Tensor | None = None
) -> Tensor:
    """x: [T, in], weight: [out, in], packed or not -> [T, out]. FP8 weights have ``scales``."""
    if scales is not None:
        product = multiply(x, weight, scales)
        return product if bias is None else product + bias
    if weight.is_mkldnn:
        # The operator that inductor calls for frozen CPU weights; there is no public one that
        # takes plain activations.
        product = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)


def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Whether oneDNN has products of this type on this machine."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def packed(weight: nn.Parameter) -> nn.Parameter:
    """The same weight [out, in] as oneDNN wants it. It can only be multiplied with."""
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight.data, None)
    use_large_pages(torch.ops.mkldnn.data_ptr(reordered), torch.ops.mkldnn._nbytes(reordered))
    return nn.Parameter(reordered, requires_grad=False)
