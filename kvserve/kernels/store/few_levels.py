"""Keys and values in 1 to 4 bits: how a vector is written, once, and which numbers it stands for.

Vectors are held *turned*: x = H (k - mean) or H v, where H is a Hadamard matrix (``turning.py``)
and the mean one of the model's keys. No softmax sees a mean that all keys of a head share, and a
query that is turned as well, H q, reads turned keys as they are; what is read of values is turned
back once for each query.

Of a turned vector of D channels, in float32, no product fused with a sum:

1. m is the sum of x_i x_i in ascending order, over D. The code c is 16 log2 of the root of m,
   rounded to nearest, plus 128, from 0 to 255: a byte, which stands for s = 2^((c - 128) / 16).
2. A step is a s, where a is a constant of the form. Levels count h = 2^(bits - 1) below 0; a level
   stands for (level - h + 1/2) step.
3. A level is floor(x_i / step) + h, from 0 to 2 h - 1.
4. Keys of a model with a table are *shaped* so that their error points where queries do not look:
   GPTQ's rule (arXiv 2210.17323, algorithm 1) on the entry itself. Channels are visited in the
   order o of the table, from the last to the first: t_i = x_o(i), less F_ji e_j for each j > i, the
   last j first. The level is that of t_i, and e_i is what it stands for less x_o(i). F is unit
   lower triangular.

Division by a step is a product with its reciprocal. What is not finite becomes something finite.

A *strip* has S bytes of an entry, with levels of *fields* of S channels each: field f is channels
f S to (f + 1) S - 1, from the lowest bits up. Of 4, 2 and 1 bits there is one strip of 2, 4 and 8
fields. Of 3 bits there are three: strip i has fields 2 i and 2 i + 1 in bits 0 to 5; bits 6 and 7
of the first two are the lower bits of fields 6 and 7, bits 7 and 6 of the third their highest. S is
a multiple of 4, so there may be channels behind D, which are nothing.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from kvserve.entry_format import few
from kvserve.kernels.store.entries import Shaping

PLAIN = {1: 1.5958, 2: 0.9957, 3: 0.5860, 4: 0.3352}
"""Steps of least error, in roots of the mean square of a Gaussian (Max, 1960, table II)."""
SHAPED = {1: 2.1, 2: 1.15, 3: 0.70, 4: 0.38}
"""Wider ones for errors that are fed back, which widen what is rounded."""
VALUES = {1: 2.15, 2: 1.15, 3: 0.63, 4: 0.36}
"""Wider ones for values: a step of least error makes numbers smaller, and so what attention adds up
of many of them."""
_THRESHOLDS = tuple(2 ** ((2 * k - 1) / 16) for k in range(1, 9))


@cache
def scales() -> Tensor:
    """What codes stand for: float32 [256]."""
    return 2 ** ((torch.arange(256, dtype=torch.float64) - 128) / 16).float()


def codes_of(x: Tensor) -> Tensor:
    """uint8 codes of turned vectors, float32 [..., D] -> [...]."""
    total = torch.zeros_like(x[..., 0])
    for channel in x.unbind(-1):
        total = total + channel * channel
    mantissa, exponent = torch.frexp(total / x.shape[-1])  # from 1/2 to 1
    above = sum((mantissa * 2 >= torch.tensor(t, device=x.device)).int() for t in _THRESHOLDS)
    code = 8 * (exponent - 1) + above + 128
    code = torch.where(total > 0, code, 0).clamp(0, 255)
    return torch.where(total.isfinite(), code, 255).to(torch.uint8)


def levels_of(x: Tensor, step: Tensor, bits: int) -> Tensor:
    """Levels of x [...], uint8, by steps."""
    half = 2 ** (bits - 1)
    levels = torch.floor(x * (1.0 / step)) + half
    return levels.nan_to_num(0.0).clamp(0, 2 * half - 1).to(torch.uint8)


def quantize(
    x: Tensor, bits: int, factor: float, shaping: Shaping | None = None
) -> tuple[Tensor, Tensor]:
    """Levels uint8 [T, H, D] and codes uint8 [T, H] of turned vectors, float32 [T, H, D]."""
    codes = codes_of(x)
    step = scales().to(x.device)[codes.long()] * factor
    if shaping is None or shaping.feedback is None or shaping.order is None:
        return levels_of(x, step[..., None], bits), codes
    half, dim = 2 ** (bits - 1) - 0.5, x.shape[-1]
    order, feedback = shaping.order.expand_as(x), shaping.feedback
    wanted = x.gather(-1, order)
    left, levels = wanted.clone(), torch.empty_like(wanted, dtype=torch.uint8)
    for i in reversed(range(dim)):
        levels[..., i] = levels_of(left[..., i], step, bits)
        error = (levels[..., i].float() - half) * step - wanted[..., i]
        left[..., :i] -= feedback[:, i, :i] * error[..., None]
    return torch.empty_like(levels).scatter_(-1, order, levels), codes


def numbers_of(levels: Tensor, codes: Tensor, bits: int, factor: float) -> Tensor:
    """What they stand for, turned: float32 [..., D], of levels [..., D] and codes [...]."""
    steps = scales().to(codes.device)[codes.long()] * factor
    return (levels.float() - (2 ** (bits - 1) - 0.5)) * steps[..., None]


def packed(levels: Tensor, bits: int) -> Tensor:
    """Bytes of a vector's strips: uint8 [..., D] -> [..., strips * S]."""
    strips, width = few(bits).strips(levels.shape[-1])
    fields = 8 if bits == 3 else 8 // bits
    padded = torch.nn.functional.pad(levels, (0, fields * width - levels.shape[-1]))
    field = padded.unflatten(-1, (fields, width)).unbind(-2)
    if strips == 1:
        return torch.stack([x << (bits * f) for f, x in enumerate(field)]).sum(0, dtype=torch.uint8)
    low = [field[2 * i] | field[2 * i + 1] << 3 for i in range(3)]
    low[0], low[1] = (x | (field[6 + i] & 3) << 6 for i, x in enumerate(low[:2]))
    low[2] = low[2] | (field[6] >> 2) << 7 | (field[7] >> 2) << 6
    return torch.cat(low, dim=-1)


def unpacked(held: Tensor, bits: int, dim: int) -> Tensor:
    """Levels of strips: uint8 [..., strips * S] -> [..., D]."""
    strips, width = few(bits).strips(dim)
    strip = held.unflatten(-1, (strips, width)).unbind(-2)
    if strips == 1:
        fields = [strip[0] >> (bits * f) & (1 << bits) - 1 for f in range(8 // bits)]
    else:
        fields = [x >> shift & 7 for x in strip for shift in (0, 3)]
        fields += [strip[0] >> 6 | strip[2] >> 5 & 4, strip[1] >> 6 | strip[2] >> 4 & 4]
    return torch.cat(fields, dim=-1)[..., :dim]
