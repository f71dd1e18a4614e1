"""Weights of ``load_format="dummy"``."""

from __future__ import annotations

import torch
from torch import nn

from kvserve.engine.models.level_products import FP8
from kvserve.engine.models.transformer import Transformer
from kvserve.kernels.layer.weight_levels import Levels


def fill_randomly(model: Transformer, seed: int) -> None:
    """Small normal weights, uniform ones where they are levels; norms are ones, so that activations
    stay in range."""
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(seed)
    of_levels = set[nn.Parameter]()
    if model.holding.matrices:
        of_levels = _fill_levels(model, generator)
    for name, parameter in model.named_parameters():
        if parameter in of_levels:
            continue
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)


def _fill_levels(model: Transformer, generator: torch.Generator) -> set[nn.Parameter]:
    """Draw those matrices that are levels; their parameters."""
    of_levels = set()
    for matrix in model.modules():
        if isinstance(matrix, Levels):
            of_levels |= set(matrix.parameters())
            if matrix.form.e4m3:
                numbers = torch.empty_like(matrix.levels, dtype=torch.float32)
                numbers.normal_(generator=generator)
                matrix.levels.copy_(numbers.to(FP8).view(torch.uint8))
            else:
                matrix.levels.random_(0, 256, generator=generator)
            matrix.scales.fill_(0.02 if matrix.form.e4m3 else 0.07 / 2**matrix.form.bits)
            if matrix.offsets is not None:
                matrix.offsets.zero_()
    return of_levels
