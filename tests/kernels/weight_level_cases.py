"""Random weights held as levels, of every form, for tests of the products."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvserve.kernels.layer.weight_levels import LevelForm, Levels

FORMS = {
    "Q4_0": LevelForm(4, 32, lowest=-8),
    "Q4_1": LevelForm(4, 32, offsets="minimum"),
    "Q8_0": LevelForm(8, 32),
    "4 bits and zeros": LevelForm(4, 128, lowest=-8, offsets="zero"),
    "4 bits in groups of 40": LevelForm(4, 40, torch.bfloat16, lowest=-8),
    "4 bits in groups of 16": LevelForm(4, 16, lowest=-8, offsets="zero"),
    "8 bits and zeros": LevelForm(8, 64, torch.bfloat16, offsets="zero"),
    "FP8": LevelForm(8, 96, torch.float32, e4m3=True),
    "W8A8": LevelForm(8, 1024, torch.float32, rounds=True),
}


def random_levels(
    form: LevelForm,
    outputs: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    experts: int | None = None,
    *,
    ordered: bool = False,
) -> Levels:
    """Of x of ``dtype``; ``ordered``: its inputs lie in any order, some places have none."""
    inputs = -(-width // 32) * 32
    form = replace(form, group=min(form.group, inputs))
    each = 1 if experts is None else experts
    order = None
    if ordered:
        order = torch.full((each, inputs), -1, dtype=torch.int32)
        for own in order:
            own[torch.randperm(inputs)[:width]] = torch.randperm(width).int()
        order = order if experts else order[0]
    shape = (outputs, width) if experts is None else (experts, outputs, width)
    weight = Levels.empty(form, shape, inputs, order)
    weight.dtype = dtype
    for one in [weight] if experts is None else [weight[i] for i in range(each)]:
        groups = one.scales.shape[-1]
        if form.e4m3:
            levels = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
        else:
            levels = torch.randint(0, 2**form.bits, (outputs, inputs)).to(torch.uint8)
        offsets = torch.randn(outputs, groups) * 0.1
        if form.offsets == "zero":
            offsets = torch.randint(-8, 8, (outputs, groups)).float()
        scales = torch.rand(outputs, groups) * 0.02 + 0.001
        one.write(slice(None), levels, scales, offsets)
    return weight
