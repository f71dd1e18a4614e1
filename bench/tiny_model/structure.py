"""The structured start that lets look-up circuits form within a minute instead of an hour.

The residual stream is divided at the start: a bias coordinate, the token's own code, then slots.
Each head of layer 0 attends a fixed number of tokens back and writes that token's code: four heads
into a slot each, the others into the space of all slots. Heads of layer 1 start out matching codes:
queries read their own token or one a few tokens back, keys read the slots "1 back" and "3 back" of
earlier tokens. Digits start on circles, and the MLP of layer 1 starts out adding the digits 5 and 2
tokens back modulo ten. Nothing is frozen, and the weights stay those of a plain Llama.
"""

import math
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.tiny_model.model import Attention, Layer, Mlp, TinyLlama

BIAS_VALUE = 3.0  # a Llama projection has no bias: coordinate 0 of every embedding stands in
OWN = 48  # coordinates 1 to 47 hold the token's own code
CODE = 20  # size of a slot; as many rotary dimensions are slow enough to match over a whole context
SLOTS = 4
OFFSETS = (1, 2, 3, 5, 4, 6, 7, 8)  # how far back layer 0's heads attend; the first four have slots
FASTEST = 6  # rotary frequencies that tell offsets apart; the others match content
SHARPNESS = 50.0
MATCH_GAIN = 1.2
BACKGROUND = 0.2
CIRCLES = 3  # digits lie on circles that they go round once, twice and three times
SUM_GAIN = 0.7


@torch.no_grad()
def init_structure(model: TinyLlama, digits: list[int]) -> None:
    """Overwrite the embedding and the attention of layers 0 and 1 of a newly drawn model.

    `digits`: the token ids of 0 to 9.
    """
    c = model.config
    spread = math.sqrt((OWN - 1 + BIAS_VALUE**2) / c.hidden_size)
    embedding = model.model.embed_tokens.weight
    codes = F.normalize(torch.randn(c.vocab_size, OWN - 1), dim=1) * math.sqrt(OWN - 1)
    axes = torch.linalg.qr(torch.randn(OWN - 1, CODE))[0]
    codes[digits] = digit_codes(codes[digits], axes[:, : 2 * CIRCLES])
    embedding.zero_()
    embedding[:, 0] = BIAS_VALUE * c.embedding_std
    embedding[:, 1:OWN] = codes * c.embedding_std
    own = torch.zeros(CODE, c.hidden_size)
    own[:, 1:OWN] = axes.T
    first, second, *_ = (layer for layer in model.model.layers if isinstance(layer, Layer))
    look_back(first.self_attn, model.frequencies, math.sqrt(SHARPNESS) * spread / BIAS_VALUE)
    slots = write_slots(first.self_attn, own, spread * c.embedding_std)
    match_codes(second.self_attn, own, slots)
    add_digits(second.mlp, slots[OFFSETS.index(2)], slots[OFFSETS.index(5)], own)
    for layer in list(model.model.layers)[1:]:
        assert isinstance(layer, Layer)
        layer.self_attn.o_proj.weight.normal_(std=0.5 * c.embedding_std * c.head_dim**-0.5)


def digit_codes(codes: Tensor, axes: Tensor) -> Tensor:
    """Digits start on circles, on which sums modulo ten are turns; the rest of a code tells them
    apart.

    codes: [10, N], each of length sqrt(N), as in the result; axes: [N, 2 * CIRCLES], orthonormal.
    """
    turns = torch.arange(10)[:, None] * torch.arange(1, CIRCLES + 1) * (2 * math.pi / 10)
    circles = torch.cat((turns.cos(), turns.sin()), dim=1) * math.sqrt(codes.shape[1] / CIRCLES)
    return F.normalize(2 * circles @ axes.T + codes, dim=1) * math.sqrt(codes.shape[1])


def add_digits(mlp: Mlp, a: Tensor, b: Tensor, own: Tensor) -> None:
    """Turn one digit's angle by another's: products of coordinates, written to the token's own
    code.

    A gate and its negative make a product exact: silu(x) y + silu(-x) (-y) = x y.
    """
    unit = 0
    for k in range(CIRCLES):
        cos, sin = k, CIRCLES + k
        for left, right, target, sign in (
            (cos, cos, cos, 1.0),
            (sin, sin, cos, -1.0),
            (sin, cos, sin, 1.0),
            (cos, sin, sin, 1.0),
        ):
            for side in (1.0, -1.0):
                mlp.gate_proj.weight[unit] = side * SUM_GAIN * a[left]
                mlp.up_proj.weight[unit] = side * SUM_GAIN * b[right]
                mlp.down_proj.weight[:, unit] = sign * SUM_GAIN * own[target]
                unit += 1


def look_back(attention: Attention, frequencies: Tensor, amplitude: float) -> None:
    """Head j attends OFFSETS[j] tokens back: its query is a constant key turned that far."""
    half = attention.head_dim // 2
    attention.q_proj.weight.zero_()
    attention.k_proj.weight.zero_()
    for keys in attention.k_proj.weight.split(attention.head_dim):
        keys[:FASTEST, 0] = amplitude
    queries_by_head = attention.q_proj.weight.split(attention.head_dim)
    for offset, queries in zip(cycle(OFFSETS), queries_by_head, strict=False):
        angles = -offset * frequencies[:FASTEST]
        queries[:FASTEST, 0] = amplitude * angles.cos()
        queries[half : half + FASTEST, 0] = amplitude * angles.sin()


def write_slots(attention: Attention, own: Tensor, scale: float) -> list[Tensor]:
    """Let each head write the code that it sees; returns a reader of each slot, [CODE, hidden]."""
    output = attention.o_proj.weight
    output.zero_()
    for values in attention.v_proj.weight.split(attention.head_dim):
        values[:CODE] = own
    slots = []
    for head in range(attention.heads):
        slot = torch.zeros(output.shape[0], CODE)
        if head < SLOTS:
            slot[OWN + CODE * head : OWN + CODE * (head + 1)] = torch.eye(CODE)
        else:
            slot[OWN:] = torch.linalg.qr(torch.randn(output.shape[0] - OWN, CODE))[0] * 0.5
        start = head * attention.head_dim
        output[:, start : start + CODE] = slot * scale
        slots.append(slot.T)
    return slots


def match_codes(attention: Attention, own: Tensor, slots: list[Tensor]) -> None:
    """Half the keys read "1 back", half "3 back"; the queries read their own token or a slot."""
    half = attention.head_dim // 2
    slow = torch.tensor([*range(FASTEST, half), *range(half + FASTEST, 2 * half)])
    queries, keys = attention.q_proj.weight, attention.k_proj.weight
    queries.mul_(BACKGROUND)
    keys.mul_(BACKGROUND)
    for group in range(attention.kv_heads):
        slot = slots[0] if 2 * group < attention.kv_heads else slots[2]
        keys[group * attention.head_dim + slow] += MATCH_GAIN * slot
    reads = (own, slots[0], slots[1], slots[2], slots[2], slots[1], slots[3], own)
    for head, read in enumerate(reads[: attention.heads]):
        queries[head * attention.head_dim + slow] += MATCH_GAIN * read
