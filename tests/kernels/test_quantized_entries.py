"""Entries held as levels: the rounding, and its bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvserve.entry_format import FORMATS, VectorForm
from kvserve.kernels.store.quantized_entries import quantize

LEVELS = [each for each in FORMATS.values() if not each.few]
FORMS = sorted({form for each in LEVELS for form in (each.key, each.value)}, key=str)
EVERY_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: str(form.code))


def vectors(*shape: int) -> Tensor:
    """Some large, some tiny, one of zeros, one of equal numbers."""
    x = torch.randn(shape) + 0.2
    x *= torch.logspace(-20, 20, len(x)).view(-1, *[1] * (len(shape) - 1))
    x[0], x[1] = 0.0, 1.3
    return x


def bound(x: Tensor, form: VectorForm) -> Tensor:
    """As the module's docstring states it: [..., D]."""
    step = quantize(x, form).step.float()[..., None]
    return torch.maximum(x.abs() / 16, step * 2**-10) if form.e4m3 else step / 2


@EVERY_FORM
@pytest.mark.parametrize("dim", [16, 48, 64])
def test_numbers_are_held_within_half_a_step(form: VectorForm, dim: int) -> None:
    x = vectors(500, 3, dim)
    held = quantize(x, form)
    assert held.levels.dtype is torch.uint8 and held.levels.shape[-1] == form.levels(dim)
    # In the last bits float32 rounds the sum with low.
    assert ((held.widened() - x).abs() <= bound(x, form) * (1 + 1e-6) + x.abs() * 1e-6).all()
    span = x.abs().amax(-1)
    if form.low:  # rounded down to bfloat16, it adds to the range
        span = x.amax(-1) - x.amin(-1) + 2**-7 * span
    assert (held.step.float() <= span / form.most * (1 + 2**-7)).all()


@EVERY_FORM
def test_stored_numbers_are_those_of_the_rule_in_float64(form: VectorForm) -> None:
    """Written down again, number by number: every operation in float64, then rounded to float32.
    Numbers of bfloat16 lie in the middle of two levels now and then; those go to the even one."""
    x = torch.cat([vectors(60, 64), vectors(300, 64).bfloat16().float()])
    held, ties = quantize(x, form), 0
    for row, vector in enumerate(x.double().tolist()):
        low = -upwards(-min(vector)) if form.low else 0.0
        span = max(vector) - low if form.low else max(map(abs, vector))
        step = upwards(float32(float32(span) / form.most))
        assert held.step[row] == step
        assert held.low is None or held.low[row] == low
        for i, number in enumerate(vector):
            exact = float32(float32(number - low) / (step or 1.0))
            ties += abs(exact) % 1 == 0.5
            least = 0 if form.low else -form.most
            level = round(max(least, min(form.most, exact)))  # Python's ties go to even, too
            assert form.e4m3 or level_of(held.levels[row], i, form) == level
    assert form.e4m3 or ties > 10


def float32(x: float) -> float:
    return float(torch.tensor(x, dtype=torch.float32))


def upwards(x: float) -> float:
    """The least bfloat16 number that is not below ``x``."""
    near = torch.tensor(x, dtype=torch.float32).bfloat16()
    more = torch.nextafter(near, torch.tensor(torch.inf, dtype=torch.bfloat16))
    return float(near if float(near) >= x else more)


def level_of(levels: Tensor, channel: int, form: VectorForm) -> int:
    if not form.low:
        return int(levels[channel].view(torch.int8))
    plane, byte = divmod(channel, len(levels))
    return int(levels[byte]) >> plane * form.bits & form.most


@EVERY_FORM
def test_special_vectors(form: VectorForm) -> None:
    zeros = quantize(torch.zeros(2, 16), form)
    assert not zeros.widened().any()
    ends = torch.tensor([-5.0, 3.0] * 8)
    assert quantize(ends, form).widened().abs().max() >= 5.0 * (1 - 1 / 16)
    equal = quantize(torch.full((16,), 0.7), form).widened()
    assert (equal == equal[0]).all() and abs(equal[0] - 0.7) < 0.7 / 16


@EVERY_FORM
def test_channels_keep_their_order(form: VectorForm) -> None:
    x = torch.arange(64.0) % (form.most + 1)
    x[0] = form.most  # so that steps are 1
    if not form.e4m3:
        assert torch.equal(quantize(x, form).widened(), x)


def test_bytes() -> None:
    """At D = 128, of bfloat16's 512."""
    sizes = {form.name: form.entry_bytes(128) for form in LEVELS}
    assert sizes == {"int8": 260, "k8v4": 198, "fp8": 260}
    for form in LEVELS:
        assert form.block_bytes(16, 32, 1, 1) == 16 * form.entry_bytes(32)
        assert form.block_bytes(1, 16, 1, 1) % 16 == 0
        assert (form.refusal(24) is None) == (min(form.key.bits, form.value.bits) == 8)
        assert form.refusal(48) is None
