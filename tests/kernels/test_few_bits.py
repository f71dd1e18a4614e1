"""Entries in few bits: the rule in float64, vector by vector, and how bytes are laid out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import few
from kvserve.kernels.store.entries import Shaping
from kvserve.kernels.store.few_levels import PLAIN, SHAPED, packed, quantize, scales, unpacked
from kvserve.kernels.store.turning import turn_cpu, turn_torch
from tests.engine.few_reference import hadamard, rounded
from tests.thinning import thinned

DIMS = [16, 48, 64, 80, 128]


def shaping(heads: int, dim: int) -> tuple[Shaping, Tensor, Tensor]:
    """As of queries that look into few directions; F and the order, too."""
    seen = torch.randn(heads, dim // 4, dim, dtype=torch.float64)
    factor = torch.linalg.cholesky(seen.mT @ seen + 0.1 * torch.eye(dim))
    feedback = factor / factor.diagonal(dim1=1, dim2=2)[:, None]
    order = torch.stack([torch.randperm(dim) for _ in range(heads)])
    mean = torch.randn(heads, dim)
    return Shaping(mean, feedback.float(), order), feedback.float(), order


@thinned({"dim": DIMS, "bits": [1, 2, 3, 4], "shaped": [False, True]})
def test_levels_and_codes_are_those_of_the_rule(dim: int, bits: int, shaped: bool) -> None:
    """Bit for bit, in float64: vectors of all lengths, beyond what a byte counts, too."""
    torch.manual_seed(dim)
    own, feedback, order = shaping(2, dim)
    held, factor = (own, SHAPED[bits]) if shaped else (None, PLAIN[bits])
    x = torch.randn(24, 2, dim) * 2.0 ** torch.linspace(-12, 12, 24)[:, None, None]
    x[3] = 0.0
    levels, codes = quantize(x, bits, factor, held)
    for token in range(len(x)):
        for head in range(2):
            how = (feedback[head], order[head]) if shaped else (None, None)
            found, code = rounded(x[token, head].double(), bits, factor, *how)
            assert (levels[token, head].tolist(), int(codes[token, head])) == (found, code)


def test_errors_point_where_nobody_looks() -> None:
    """What shaping is for: the error that queries see is smaller, whatever its length."""
    own, feedback, order = shaping(1, 64)
    x = torch.randn(300, 1, 64)
    second = feedback[0].double()  # F; with column norms it is the queries' Cholesky factor
    lost = {}
    for name, how in (("plain", None), ("shaped", own)):
        levels, codes = quantize(x, 3, PLAIN[3] if how is None else SHAPED[3], how)
        step = scales()[codes.long()] * (PLAIN[3] if how is None else SHAPED[3])
        error = (levels.float() - 3.5) * step[..., None] - x
        permuted = error[:, 0].gather(-1, order.expand(300, -1)).double()
        lost[name] = float((permuted @ second).square().sum())
    assert lost["shaped"] < 0.5 * lost["plain"]


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_becomes_finite(number: float) -> None:
    x = torch.randn(3, 1, 16)
    x[1, 0, 5] = number
    levels, codes = quantize(x, 3, PLAIN[3])
    assert int(levels.max()) < 8 and int(codes[1]) == 255
    assert torch.equal(levels[::2], quantize(x[::2], 3, PLAIN[3])[0])


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_hold_all_levels(dim: int) -> None:
    for bits in (1, 2, 3, 4):
        levels = torch.randint(0, 2**bits, (50, dim), dtype=torch.uint8)
        held = packed(levels, bits)
        assert held.shape[-1] == few(bits).levels(dim)
        assert torch.equal(unpacked(held, bits, dim), levels)


@pytest.mark.parametrize("dim", [*DIMS, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_is_its_own_inverse(dim: int, dtype: torch.dtype) -> None:
    x, mean = torch.randn(5, 3, dim).to(dtype), torch.randn(3, dim)
    expected = (x.double() - mean.double()) @ hadamard(dim)
    turned = turn_torch(x, mean, torch.float32)
    torch.testing.assert_close(turned, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(turn_torch(turned) + mean, x.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.compiler
@pytest.mark.parametrize("dim", [*DIMS, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_turning(dim: int, dtype: torch.dtype) -> None:
    x: Tensor = torch.randn(5, 7, dim).to(dtype)[:, 2:5]
    mean = torch.randn(3, dim)
    for given in (None, mean):
        for out in (torch.float32, dtype):
            assert torch.equal(turn_cpu(x, given, out), turn_torch(x, given, out))
