"""Matrix products over packed weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kvserve.engine.models.linear import can_pack, linear, packed

needs_onednn = pytest.mark.skipif(not can_pack(torch.float32, "cpu"), reason="torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("tokens", [0, 1, 3, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_weights_multiply_like_plain_ones(tokens: int, *, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, 48), nn.Parameter(torch.randn(80, 48), requires_grad=False)
    bias = torch.randn(80) if with_bias else None
    product = linear(x, packed(weight), bias)
    torch.testing.assert_close(product, F.linear(x, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cuda"), (torch.float16, "cpu")])
def test_other_types_and_devices_stay_plain(dtype: torch.dtype, device: str) -> None:
    assert not can_pack(dtype, device)
