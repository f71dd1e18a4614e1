"""``sample_tokens.py`` in Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvserve.kernels.checks import check_dense
from kvserve.kernels.dispatch import Helper, Kernel, num_processors
from kvserve.kernels.ordering import order_of
from kvserve.kernels.sample.cut_offs import cut_offs

if TYPE_CHECKING:
    import triton.language as tl


# Tokens that a program takes at once.
_DRAW_TILE = 1024


def sample_tokens_triton(
    logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor, filtered: bool
) -> Tensor:
    """As ``sample_tokens_torch``, in four launches (one, if nothing is filtered) and no sort.

    Hash, division and ties are the reference's bit for bit. Probabilities are added in another
    order and logarithms rounded differently, so the answer may be another one only where a token
    stands within some float32 rounding of the top-p or min-p limit, or of the winner.
    """
    rows, vocab = _check(logits, settings, seeds, positions)
    tiles = -(-vocab // _DRAW_TILE)
    # Eight programs for each multiprocessor, if there is as much to do.
    parts = min(tiles, -(-8 * num_processors(logits.device) // max(1, rows)))
    best = logits.new_empty(rows, parts)
    tokens = torch.empty_like(best, dtype=torch.int64)
    _draw.launch(
        (rows, parts),
        *(best, tokens, logits, cut_offs(logits, settings) if filtered else seeds),
        *(settings, seeds, positions, vocab, logits.stride(0), -(-tiles // parts) * _DRAW_TILE),
        FILTERED=filtered,
        TILE=_DRAW_TILE,
        num_warps=4,
    )
    return tokens.gather(1, best.argmax(dim=1, keepdim=True))[:, 0]


def _check(logits: Tensor, settings: Tensor, seeds: Tensor, positions: Tensor) -> tuple[int, int]:
    rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or vocab == 0 or logits.stride(1) != 1:
        raise ValueError(
            f"logits need float32, dense rows of one token or more; got {logits.dtype} "
            f"{list(logits.shape)}, strides {list(logits.stride())}"
        )
    check_dense("settings", settings, (rows, 4), torch.float32)
    for name, x in (("seeds", seeds), ("positions", positions)):
        check_dense(name, x, (rows,), torch.int64)
    return rows, vocab


@Helper
def _mixed(x):
    """``_mix`` in uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@Kernel
def _draw(
    best,
    tokens,
    logits,
    cuts,
    settings,
    seeds,
    positions,
    vocab,
    stride,
    share,
    FILTERED: tl.constexpr,
    TILE: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(settings + row * 4)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    cut, seed = tl.load(cuts + row), tl.load(seeds + row)
    key = _mixed((seed ^ (seed >> 32)).to(tl.uint32))
    key = _mixed(key ^ tl.load(positions + row).to(tl.uint32))
    top = tl.full([TILE], float("-inf"), tl.float32)
    winner = tl.zeros([TILE], tl.int32)
    for start in range(part * share, tl.minimum(part * share + share, vocab), TILE):
        token = start + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + token, mask=token < vocab, other=float("-inf"))
        x = tl.div_rn(x, divisor)
        drawn = temperature > 0
        if FILTERED:
            x = tl.where(order_of(x, token) >= cut, x, float("-inf"))
            drawn = drawn & (tl.max(x) > float("-inf"))
        if drawn:
            bits = _mixed(key + token.to(tl.uint32) * 0x9E3779B1)
            uniform = ((bits >> 9).to(tl.float32) + 0.5) * 2.0**-23
            x -= tl.log(-tl.log(uniform))
        better = x > top
        top = tl.where(better, x, top)
        winner = tl.where(better, token, winner)
    most = tl.max(top)
    first = tl.min(tl.where(top == most, winner, vocab))
    place = row * tl.num_programs(1) + part
    tl.store(best + place, most)
    tl.store(tokens + place, first)
