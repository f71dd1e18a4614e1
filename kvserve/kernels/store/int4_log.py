"""Queries logged in 4 bits, with a scale and a share of attention for each vector.

A vector of D numbers takes D / 2 bytes and two float16 numbers: its scale, a seventh of its largest
magnitude, and the logarithm of the share of its attention that the query gave to the newest entries
it saw. The log-sum-exp over all entries follows from this share and those entries' keys, for the
query in 4 bits; a stored log-sum-exp would be off by what rounding does to all logits alike. Byte j
holds the codes of dimensions 2j (low) and 2j + 1 (high); a code is its number plus 8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.calls import LARGEST_DIM, Compiled, as_int64, slot_outside
from kvserve.kernels.checks import check_dense
from kvserve.kernels.store.slot_mapping import by_row, places_of

_STORE_INT4, _GATHER_INT4 = (Compiled(name, "storage") for name in ("store_int4", "gather_int4"))
LEVELS = 7
"""The largest code is 7, the smallest -7."""
_LARGEST = 65504.0  # of float16


class Int4Queries(NamedTuple):
    """Vectors as they are logged: ``codes uint8 [..., D / 2]``, ``scales float16 [..., 2]``.

    The first of ``scales`` is the scale, the second the logarithm of the share. Leading dimensions
    are those of a log, ``[num_blocks, Lb, tokens, Hb]``, or of queries read from one, ``[..., Hq,
    W]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the vectors: [..., D]."""
        return torch.Size((*self.codes.shape[:-1], 2 * self.codes.shape[-1]))

    @property
    def shares(self) -> Tensor:
        """Logarithms of the share of attention that newest entries got: float32 [...]."""
        return self.scales[..., 1].float()

    def float(self) -> Tensor:
        """The vectors: float32 [..., D]."""
        both = torch.stack([self.codes & 15, self.codes >> 4], dim=-1).flatten(-2)
        return (both.to(torch.int8) - 8).float() * self.scales[..., :1].float()

    def rows(self, part: slice) -> Int4Queries:
        """Some of the W queries of ``[..., Hq, W]``."""
        return Int4Queries(self.codes[..., part, :], self.scales[..., part, :])


def int4_log(blocks: Tensor, heads: int, dim: int, tokens: int) -> Int4Queries:
    """The memory ``blocks uint8 [num_blocks, Lb, bytes]`` as a log of ``heads`` vectors a token.

    Views ``[num_blocks, Lb, tokens, heads, ...]``: first all codes, then all scales, from an even
    byte on. The rest of a block is not used.
    """
    codes = tokens * heads * dim // 2
    first = codes + codes % 2
    numbers = blocks[..., first : first + tokens * heads * 4].view(torch.float16)
    shape = tokens, heads, -1
    return Int4Queries(blocks[..., :codes].unflatten(-1, shape), numbers.unflatten(-1, shape))


def quantize(x: Tensor, shares: Tensor) -> Int4Queries:
    """x: [..., D] and float32 ``shares [...]`` as they are logged."""
    wide = x.float()
    largest = wide.abs().amax(dim=-1, keepdim=True)
    scale = (largest / LEVELS).clamp(max=_LARGEST).half()
    inverse = torch.where(scale > 0, 1.0 / scale.float(), 0.0)
    numbers = torch.floor(wide * inverse + 0.5).clamp(-LEVELS, LEVELS).to(torch.int16) + 8
    low, high = numbers.unflatten(-1, (-1, 2)).unbind(-1)
    codes = (low | (high << 4)).to(torch.uint8)
    log_share = shares.clamp(-_LARGEST, _LARGEST).half()
    return Int4Queries(codes, torch.cat([scale, log_share[..., None]], dim=-1))


def store_int4_torch(
    log: Int4Queries, layer: int, slots: Tensor, query: Tensor, shares: Tensor
) -> None:
    """Log one layer's queries; the reference. Those that go to block 0, the null block, are not
    used.

    log: [num_blocks, Lb, tokens, Hb, ...]; layer: the layer's place in its block; slots: int64
    [R, T]; query: [T, R * Hb, D]; shares: float32 [T, R * Hb].
    """
    tokens = log.codes.shape[2]
    for numbers, x in zip(log, quantize(query, shares), strict=True):
        numbers[:, layer][slots // tokens, slots % tokens] = by_row(x, slots)


def store_int4_cpu(
    log: Int4Queries, layer: int, slots: Tensor, query: Tensor, shares: Tensor
) -> None:
    """``ValueError`` for shapes that do not fit each other; ``IndexError``, with nothing written,
    for a slot that is not there."""
    num_blocks, _, size, heads, half = log.codes.shape
    tables, tokens = slots.shape
    dim, width = 2 * half, tables * heads
    check_dense("shares", shares, (tokens, width), torch.float32)
    check_dense("slots", slots, (tables, tokens), torch.int64)
    fits = query.shape == (tokens, width, dim) and query.stride()[1:] == (dim, 1)
    fits &= query.dtype in (torch.float32, torch.bfloat16)
    if not fits or dim % 8 or dim > LARGEST_DIM:
        raise ValueError(
            f"store_int4: queries of {query.dtype} {list(query.shape)} for slots "
            f"{list(slots.shape)} of a log {list(log.shape)}: {[tokens, width, dim]} of float32 or "
            f"bfloat16, dense, of up to {LARGEST_DIM} dimensions, are needed"
        )
    codes, scales = log.codes[:, layer], log.scales[:, layer]
    _STORE_INT4(
        *(query, shares, codes, scales, slots),
        *(query.stride(0), codes.stride(0), scales.stride(0)),
        *(tokens, num_blocks, size, tables, heads, dim, query.dtype is torch.bfloat16),
        refused=slot_outside(num_blocks, size),
    )


def gather_int4_torch(
    log: Int4Queries, slots: Tensor, layer_ids: Tensor | None = None
) -> Int4Queries:
    """Logged queries of layers ``layer_ids [L']`` (default: all), as they are: [L', Hlog, S, ...];
    the reference.

    log: [num_blocks, Lb, tokens, Hb, ...]; slots: int64 [L', Hlog, S], of the log.
    """
    at = places_of(log.codes.shape, slots, layer_ids)
    return Int4Queries(log.codes[at], log.scales[at])


def gather_int4_cpu(
    log: Int4Queries, slots: Tensor, layer_ids: Tensor | None = None
) -> Int4Queries:
    """``IndexError``, with nothing read, for a slot that is not there."""
    num_blocks, layers, size, heads, half = log.codes.shape
    slots, ids = as_int64(slots), None if layer_ids is None else as_int64(layer_ids)
    codes = log.codes.new_empty(*slots.shape, half)
    found = Int4Queries(codes, log.scales.new_empty(*slots.shape, 2))
    _GATHER_INT4(
        *(*log, slots, ids, *found),
        *(x.stride(at) for at in (0, 1) for x in log),
        *(*slots.shape, num_blocks, layers, size, heads, 2 * half),
        refused=slot_outside(num_blocks, size),
    )
    return found
