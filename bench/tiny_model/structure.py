"""The structured start that lets look-up circuits form within a minute instead of an hour.

The residual stream begins divided: a bias coordinate, the token's own code, then a slot per head of
layer 0. Each of these heads looks a fixed number of tokens back and writes that token's code into its
slot. The heads of later layers start out matching codes: what stood some tokens back here against what
stands some tokens before an earlier place, as the formats of the tasks have it. Digits begin on circles,
and the MLP of layer 1 begins adding the digits 5 and 2 tokens back modulo ten. Nothing is frozen, and
the weights stay those of a plain Llama.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.tiny_model.model import Attention, Layer, Mlp, TinyLlama

BIAS_VALUE = 3.0  # a Llama projection has no bias: coordinate 0 of every embedding stands in
CODE = 16  # a slot's size
OFFSETS = (1, 2, 3, 4, 5, 6, 7, 8)  # how far back the heads of layer 0 look
FASTEST = 6  # rotary frequencies that tell offsets apart; the others match content
SHARPNESS = 50.0
# Per later layer and KV head: the offset of the keys, and those that its query heads compare with it
# (0 is the token itself).
MATCHES = (
    ((1, (0, 0, 3, 2)), (2, (1, 1, 2, 0))),
    ((4, (4, 3, 5, 4)), (6, (3, 2, 6, 3))),
    ((3, (3, 1, 0, 2)), (8, (3, 3, 8, 0))),
)
MATCH_GAIN = 1.7
BACKGROUND = 0.2
COPY_GAIN = 0.2
CIRCLES = 3  # digits stand on circles that they go round once, twice and three times
SUM_GAIN = 0.8
COMMA_GAIN = 16.0


@torch.no_grad()
def init_structure(model: TinyLlama, digits: list[int], comma: int) -> None:
    """Overwrite the embedding, the attention and part of an MLP of a freshly drawn model.

    `digits`: the token ids of 0 to 9; `comma`: that of the sign before a result.
    """
    c = model.config
    first, *later = (layer for layer in model.model.layers if isinstance(layer, Layer))
    own_size = c.hidden_size - CODE * len(OFFSETS) - 1
    codes, axes = draw_codes(c.vocab_size, own_size, digits)
    embedding = model.model.embed_tokens.weight
    embedding.zero_()
    embedding[:, 0] = BIAS_VALUE * c.embedding_std
    embedding[:, 1 : 1 + own_size] = codes * c.embedding_std
    own = torch.zeros(CODE, c.hidden_size)
    own[:, 1 : 1 + own_size] = axes.T
    spread = math.sqrt((own_size + BIAS_VALUE**2) / c.hidden_size)
    look_back(first.self_attn, model.frequencies, math.sqrt(SHARPNESS) * spread / BIAS_VALUE)
    read = {0: own, **write_slots(first.self_attn, own, spread * c.embedding_std)}
    for layer, matches in zip(later, MATCHES, strict=False):
        output = layer.self_attn.o_proj.weight
        output.normal_(std=0.5 * c.embedding_std * c.head_dim**-0.5)
        match_codes(layer.self_attn, read, matches)
        copy_codes(layer.self_attn, own, COPY_GAIN * c.embedding_std)
    code = axes.T @ codes[comma]
    after_comma = read[1].T @ code / code.square().sum()
    add_digits(later[0].mlp, read[2], read[5], after_comma, own)


def draw_codes(count: int, size: int, digits: list[int]) -> tuple[Tensor, Tensor]:
    """Codes [count, size] of length sqrt(size), and the axes [size, CODE] that slots keep of them.

    Along the axes codes are pushed apart, so that a slot tells all tokens from each other.
    """
    axes = torch.linalg.qr(torch.randn(size, CODE))[0]
    kept = F.normalize(torch.randn(count, CODE), dim=1)
    for _ in range(200):
        near = (kept @ kept.T).fill_diagonal_(-1.0).mul(8.0).exp()
        kept = F.normalize(kept - 0.02 * near @ kept / near.mean(), dim=1)
    rest = torch.randn(count, size)
    rest = F.normalize(rest - rest @ axes @ axes.T, dim=1) * math.sqrt(size - CODE)
    codes = kept @ axes.T * math.sqrt(CODE) + rest
    turns = torch.arange(10)[:, None] * torch.arange(1, CIRCLES + 1) * (2 * math.pi / 10)
    circles = torch.cat((turns.cos(), turns.sin()), dim=1) * math.sqrt(size / CIRCLES)
    mixed = 2 * circles @ axes[:, : 2 * CIRCLES].T + codes[digits]
    codes[digits] = F.normalize(mixed, dim=1) * math.sqrt(size)
    return codes, axes


def add_digits(mlp: Mlp, a: Tensor, b: Tensor, comma: Tensor, own: Tensor) -> None:
    """Turn one digit's angle by another's: products of their coordinates, written where codes stand.

    a, b: [CODE, hidden], what reads the digits' slots; comma: [hidden], how much the token before is
    a comma, 1 for one. Two gates make a product: silu(z + x) y - silu(z - x) y is 2 x y where z is
    large and nothing where it is far below zero, that is unless a comma stands before.
    """
    gate = COMMA_GAIN * comma
    gate[0] -= COMMA_GAIN / 2 / BIAS_VALUE
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
                mlp.gate_proj.weight[unit] = gate + side * SUM_GAIN * a[left]
                mlp.up_proj.weight[unit] = side * SUM_GAIN * b[right]
                mlp.down_proj.weight[:, unit] = sign * SUM_GAIN * own[target]
                unit += 1


def look_back(attention: Attention, frequencies: Tensor, amplitude: float) -> None:
    """Heads attend a fixed number of tokens back: a constant query is a constant key turned so far."""
    half = attention.head_dim // 2
    attention.q_proj.weight.zero_()
    attention.k_proj.weight.zero_()
    for keys in attention.k_proj.weight.split(attention.head_dim):
        keys[:FASTEST, 0] = amplitude
    for offset, queries in zip(
        OFFSETS, attention.q_proj.weight.split(attention.head_dim), strict=False
    ):
        angles = -offset * frequencies[:FASTEST]
        queries[:FASTEST, 0] = amplitude * angles.cos()
        queries[half : half + FASTEST, 0] = amplitude * angles.sin()


def write_slots(attention: Attention, own: Tensor, scale: float) -> dict[int, Tensor]:
    """Let each head write the code it sees; returns what reads each offset's slot, [CODE, hidden]."""
    output = attention.o_proj.weight
    output.zero_()
    for values in attention.v_proj.weight.split(attention.head_dim):
        values[:CODE] = own
    slots = {}
    for head, offset in enumerate(OFFSETS):
        slot = torch.zeros(output.shape[0], CODE)
        end = output.shape[0] - CODE * head
        slot[end - CODE : end] = torch.eye(CODE)
        start = head * attention.head_dim
        output[:, start : start + CODE] = slot * scale
        slots[offset] = slot.T
    return slots


def match_codes(
    attention: Attention, read: dict[int, Tensor], matches: tuple[tuple[int, tuple[int, ...]], ...]
) -> None:
    """Queries and keys read slots, in the rotary dimensions that hardly turn."""
    half = attention.head_dim // 2
    slow = torch.tensor([*range(half - CODE // 2, half), *range(2 * half - CODE // 2, 2 * half)])
    queries, keys = attention.q_proj.weight, attention.k_proj.weight
    queries.mul_(BACKGROUND)
    keys.mul_(BACKGROUND)
    group = attention.heads // attention.kv_heads
    for kv_head, (key_offset, query_offsets) in enumerate(matches):
        keys[kv_head * attention.head_dim + slow] += MATCH_GAIN * read[key_offset]
        for i, offset in enumerate(query_offsets[:group]):
            queries[(kv_head * group + i) * attention.head_dim + slow] += MATCH_GAIN * read[offset]


def copy_codes(attention: Attention, own: Tensor, gain: float) -> None:
    """What a head sees begins to be what comes next."""
    for values in attention.v_proj.weight.split(attention.head_dim):
        values[:CODE] = own
    for start in range(0, attention.heads * attention.head_dim, attention.head_dim):
        attention.o_proj.weight[:, start : start + CODE] += gain * own.T
