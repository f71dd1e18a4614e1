"""Queries logged in 4 bits, with a scale and a share of attention for each vector.

A vector of D numbers takes D / 2 bytes and two float16 numbers: its scale, a seventh of its largest
magnitude, and the logarithm of the share of its attention that the query gave to the newest entries
it saw. The log-sum-exp over all entries follows from this share and those entries' keys, for the
query in 4 bits; a stored log-sum-exp would be off by what rounding does to all logits alike. Byte j
holds the codes of dimensions 2j (low) and 2j + 1 (high); a code is its number plus 8.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense, check_head_dim
from kvserve.kernels.cpu.calls import LARGEST_DIM, Compiled, as_int64, slot_outside
from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.store.slot_mapping import by_row, places_of

if TYPE_CHECKING:
    import triton.language as tl

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


def store_int4_triton(
    log: Int4Queries, layer: int, slots: Tensor, query: Tensor, shares: Tensor
) -> None:
    """One program per token and row. Slots outside of the log are left alone."""
    num_blocks, _, block, heads, half = log.codes.shape
    rows, tokens = slots.shape
    check_head_dim(query)
    wanted = tokens, rows * heads, 2 * half
    if query.shape != wanted or query.stride(1) != 2 * half:
        shapes = f"queries {list(wanted)} with contiguous tokens expected, got {list(query.shape)}"
        raise ValueError(shapes)
    check_dense("shares", shares, wanted[:2], torch.float32)
    codes, scales = (part[:, layer] for part in log)
    _store_int4.launch(
        (tokens, rows),
        *(codes, scales, slots.contiguous(), query, shares),
        *(query.stride(0), num_blocks * block, *codes.stride()[:2], *scales.stride()[:2]),
        BLOCK=block,
        HEADS=heads,
        SPAN=1 << (heads - 1).bit_length(),
        DIM=2 * half,
        num_warps=4 if heads * half >= 1024 else 1,
        enable_fp_fusion=False,  # the reference rounds the product first
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


def gather_int4_triton(
    log: Int4Queries, slots: Tensor, layer_ids: Tensor | None = None
) -> Int4Queries:
    """Vectors of slots outside of the log are 0."""
    num_blocks, layers, block, heads, half = log.codes.shape
    if layer_ids is None:
        layer_ids = torch.arange(slots.shape[0], device=slots.device)
    codes = log.codes.new_empty(*slots.shape, half)
    scales = log.scales.new_empty(*slots.shape, 2)
    tile = max(16, 4096 // half)
    _gather_int4.launch(
        (slots.shape[0] * slots.shape[1], -(-slots.shape[2] // tile)),
        *(codes, scales, *log, slots.contiguous(), layer_ids),
        *(slots.shape[2], slots.shape[1], layers, num_blocks * block),
        *(*log.codes.stride()[:3], *log.scales.stride()[:3]),
        BLOCK=block,
        HEADS=heads,
        HALF=half,
        TILE=tile,
        num_warps=4,
    )
    return Int4Queries(codes, scales)


@Helper
def widened(codes):
    """uint8 [ROWS, D / 2] -> the numbers from -7 to 7: int32 [ROWS, D]."""
    wide = codes.to(tl.int32)
    return tl.interleave((wide & 15) - 8, (wide >> 4) - 8)


@Kernel
def _store_int4(
    codes,
    scales,
    slots,
    query,
    shares,
    token_stride,
    num_slots,
    codes_block_stride,
    codes_token_stride,
    scales_block_stride,
    scales_token_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    SPAN: tl.constexpr,
    DIM: tl.constexpr,
):
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + row * tl.num_programs(0) + token)
    head, dims, pairs = tl.arange(0, SPAN), tl.arange(0, DIM), tl.arange(0, DIM // 2)
    real = (head < HEADS) & (slot >= 0) & (slot < num_slots)
    first = row * HEADS
    at = query + token * token_stride + ((first + head) * DIM)[:, None] + dims[None, :]
    x = tl.load(at, mask=real[:, None], other=0.0).to(tl.float32)
    log_share = tl.load(
        shares + token * (tl.num_programs(1) * HEADS) + first + head, mask=real, other=0.0
    )
    scale = tl.minimum(tl.div_rn(tl.max(tl.abs(x), axis=1), 7.0), 65504.0).to(tl.float16)
    wide = scale.to(tl.float32)
    inverse = tl.where(wide > 0, tl.div_rn(1.0, tl.where(wide > 0, wide, 1.0)), 0.0)
    number = tl.floor(x * inverse[:, None] + 0.5)
    number = tl.minimum(tl.maximum(number, -7.0), 7.0).to(tl.int32) + 8
    low, high = tl.split(tl.reshape(number, [SPAN, DIM // 2, 2]))
    block, place = slot // BLOCK, slot % BLOCK
    to = codes + block * codes_block_stride + place * codes_token_stride
    to_at = to + (head * (DIM // 2))[:, None] + pairs[None, :]
    tl.store(to_at, (low | (high << 4)).to(tl.uint8), mask=real[:, None])
    to = scales + block * scales_block_stride + place * scales_token_stride + head * 2
    log_share = tl.minimum(tl.maximum(log_share, -65504.0), 65504.0)
    tl.store(to, scale, mask=real)
    tl.store(to + 1, log_share.to(tl.float16), mask=real)


@Kernel
def _gather_int4(
    codes_out,
    scales_out,
    codes,
    scales,
    slots,
    layer_ids,
    length,
    log_heads,
    layers,
    num_slots,
    codes_block_stride,
    codes_layer_stride,
    codes_token_stride,
    scales_block_stride,
    scales_layer_stride,
    scales_token_stride,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(0)
    layer = (tl.load(layer_ids + lane // log_heads) % layers).to(tl.int64)
    head = lane % log_heads % HEADS
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = place < length
    first = lane.to(tl.int64) * length
    slot = tl.load(slots + first + place, mask=wanted, other=-1)
    known = (slot >= 0) & (slot < num_slots)
    block, token = slot // BLOCK, slot % BLOCK
    pairs, both = tl.arange(0, HALF)[None, :], tl.arange(0, 2)[None, :]
    old = codes + layer * codes_layer_stride + head * HALF + pairs
    old += (block * codes_block_stride + token * codes_token_stride)[:, None]
    # A code of 8 is 0.
    found = tl.load(old, mask=known[:, None], other=0x88)
    tl.store(codes_out + (first + place)[:, None] * HALF + pairs, found, mask=wanted[:, None])
    old = scales + layer * scales_layer_stride + head * 2 + both
    old += (block * scales_block_stride + token * scales_token_stride)[:, None]
    numbers = tl.load(old, mask=known[:, None], other=0.0)
    tl.store(scales_out + (first + place)[:, None] * 2 + both, numbers, mask=wanted[:, None])
