"""``elementwise.py`` in Triton. Arithmetic is float32, and rounds wherever torch's operators do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.dispatch import Helper, Kernel
from kvserve.kernels.layer.elementwise import E4M3_MAX, SMALLEST

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 1024


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As ``rms_norm``; x: [T, N], or heads of a wider row [T, heads, N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    wide = x.unsqueeze(1) if x.dim() == 2 else x
    _check("rms_norm", wide, weight.shape == wide.shape[-1:] and weight.dtype is x.dtype)
    _launch_norm(wide, None, weight, eps, None, out)
    return out


def add_rms_norm_triton(
    x: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As ``add_rms_norm``, in one launch."""
    fits = added.shape == x.shape and weight.shape == x.shape[1:]
    alike = added.dtype is weight.dtype is x.dtype
    _check("add_rms_norm", x, fits and alike and added.is_contiguous())
    whole, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch_norm(x.unsqueeze(1), added, weight, eps, whole, out)
    return whole, out


def _launch_norm(
    x: Tensor, added: Tensor | None, weight: Tensor, eps: float, whole: Tensor | None, out: Tensor
) -> None:
    """x: [T, heads, N]; ``added`` is added to it first, and the sum goes to ``whole``."""
    tokens, heads, width = x.shape
    _rms_norm.launch(
        (tokens, heads),
        *(out, x, x if added is None else added, weight, out if whole is None else whole),
        *(*x.stride()[:2], eps),
        ADDS=added is not None,
        WIDTH=width,
        SPAN=1 << (width - 1).bit_length(),
        num_warps=8 if width > 2048 else 4 if width > 256 else 1,
    )


def rotate_triton(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As ``rotate``."""
    tokens, heads, dim = x.shape
    fits = cos.shape == sin.shape == (tokens, 1, dim) and cos.dtype is sin.dtype is x.dtype
    _check("rotate", x, fits and dim % 2 == 0 and cos.is_contiguous() and sin.is_contiguous())
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate.launch(
        (tokens,),
        *(out, x, cos, sin, *x.stride()[:2]),
        HEADS=heads,
        HEAD_SPAN=1 << (heads - 1).bit_length(),
        HALF=dim // 2,
        HALF_SPAN=1 << (dim // 2 - 1).bit_length(),
        num_warps=4,
        enable_fp_fusion=False,  # both products are rounded, as torch rounds them
    )
    return out


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """As ``silu_and_mul``."""
    tokens, both = gate_up.shape
    _check("silu_and_mul", gate_up, both % 2 == 0)
    out = gate_up.new_empty(tokens, both // 2)
    grid = tokens, -(-both // 2 // _TILE)
    _silu_and_mul.launch(
        grid, out, gate_up, gate_up.stride(0), WIDTH=both // 2, TILE=_TILE, num_warps=4
    )
    return out


def quantize_rows_triton(x: Tensor) -> tuple[Tensor, Tensor]:
    """As ``quantize_rows``, in one launch instead of eight."""
    tokens, width = x.shape
    _check("quantize_rows", x, width > 0)
    out = torch.empty(tokens, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(tokens, 1, dtype=torch.float32, device=x.device)
    _quantize_rows.launch(
        (tokens,),
        *(out, scales, x, x.stride(0), SMALLEST, E4M3_MAX),
        WIDTH=width,
        SPAN=1 << (width - 1).bit_length(),
        num_warps=16 if width > 8192 else 8 if width > 2048 else 4,
    )
    return out, scales


def _check(name: str, x: Tensor, fits: bool) -> None:
    if not fits or x.stride(-1) != 1:
        raise ValueError(
            f"{name}: {x.dtype} {list(x.shape)}, strides {list(x.stride())}: dense rows, and "
            "operands that fit them, are needed"
        )


@Kernel
def _rms_norm(
    out,
    x,
    added,
    weight,
    whole,
    token_stride,
    head_stride,
    eps,
    ADDS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, SPAN)
    mask = place < WIDTH
    numbers = tl.load(x + token * token_stride + head * head_stride + place, mask=mask, other=0.0)
    row = token * tl.num_programs(1) + head
    if ADDS:
        more = tl.load(added + row * WIDTH + place, mask=mask, other=0.0)
        numbers = (numbers.to(tl.float32) + more.to(tl.float32)).to(numbers.dtype)
        tl.store(whole + row * WIDTH + place, numbers, mask=mask)
    wide = numbers.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    scale = tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    rounded = wide.to(numbers.dtype).to(tl.float32) * scale
    tl.store(out + row * WIDTH + place, rounded.to(numbers.dtype), mask=mask)


@Helper
def rotated(source, cos, sin, mask, known, HALF: tl.constexpr):
    """Both halves of the vectors at ``source``, of pointers to their first halves; ``cos``, ``sin``
    point to the first halves of their angles."""
    left = tl.load(source, mask=mask, other=0.0)
    right = tl.load(source + HALF, mask=mask, other=0.0)
    first = tl.load(cos, mask=known, other=0.0).to(tl.float32)
    second = tl.load(cos + HALF, mask=known, other=0.0).to(tl.float32)
    first_sin = tl.load(sin, mask=known, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + HALF, mask=known, other=0.0).to(tl.float32)
    dtype = left.dtype
    left, right = left.to(tl.float32), right.to(tl.float32)
    one = (left * first).to(dtype).to(tl.float32)
    one -= (right * first_sin).to(dtype).to(tl.float32)
    other = (right * second).to(dtype).to(tl.float32)
    other += (left * second_sin).to(dtype).to(tl.float32)
    return one.to(dtype), other.to(dtype)


@Kernel
def _rotate(
    out,
    x,
    cos,
    sin,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_SPAN: tl.constexpr,
    HALF: tl.constexpr,
    HALF_SPAN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head, place = tl.arange(0, HEAD_SPAN)[:, None], tl.arange(0, HALF_SPAN)[None]
    mask, known = (head < HEADS) & (place < HALF), place < HALF
    source = x + token * token_stride + head * head_stride + place
    angles = token * 2 * HALF + place
    left, right = rotated(source, cos + angles, sin + angles, mask, known, HALF)
    target = out + (token * HEADS + head) * 2 * HALF + place
    tl.store(target, left, mask=mask)
    tl.store(target + HALF, right, mask=mask)


@Kernel
def _silu_and_mul(out, gate_up, token_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = place < WIDTH
    source = gate_up + token * token_stride + place
    gate = tl.load(source, mask=mask, other=0.0)
    up = tl.load(source + WIDTH, mask=mask, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + token * WIDTH + place, (activated * up).to(gate.dtype), mask=mask)


@Kernel
def _quantize_rows(
    out, scales, x, token_stride, smallest, most, WIDTH: tl.constexpr, SPAN: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, SPAN)
    mask = place < WIDTH
    numbers = tl.load(x + token * token_stride + place, mask=mask, other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(numbers)), smallest)
    rounded = tl.clamp(numbers * tl.div_rn(most, largest), -most, most)
    tl.store(out + token * WIDTH + place, rounded.to(out.dtype.element_ty), mask=mask)
    tl.store(scales + token, tl.div_rn(largest, most))
