"""The structured start that lets look-up circuits form within a minute instead of an hour.

The residual stream begins divided: a bias coordinate, the token's own code, then slots. Head j of
layer 0 looks exactly j + 1 tokens back and writes that token's code: the nearest four into a slot
each, the others into the space of all slots. Heads of layer 1 start out matching codes: one's own
token, or what stood a few tokens back, against the slots "1 back" and "3 back" of earlier tokens.
Nothing is frozen, and the weights stay those of a plain Llama.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.tiny_model.model import Attention, Layer, TinyLlama

BIAS_VALUE = 3.0  # a Llama projection has no bias: coordinate 0 of every embedding stands in
OWN = 48  # coordinates 1 to 47 hold the token's own code
CODE = 20  # a slot's size, and the rotary dimensions slow enough to match over a whole context
SLOTS = 4
FASTEST = 6  # rotary frequencies that tell offsets apart; the others match content
SHARPNESS = 40.0
MATCH_GAIN = 1.2
BACKGROUND = 0.2


@torch.no_grad()
def init_structure(model: TinyLlama) -> None:
    """Overwrite the embedding and the attention of layers 0 and 1 of a freshly drawn model."""
    c = model.config
    spread = math.sqrt((OWN - 1 + BIAS_VALUE**2) / c.hidden_size)
    embedding = model.model.embed_tokens.weight
    codes = F.normalize(torch.randn(c.vocab_size, OWN - 1), dim=1) * math.sqrt(OWN - 1)
    embedding.zero_()
    embedding[:, 0] = BIAS_VALUE * c.embedding_std
    embedding[:, 1:OWN] = codes * c.embedding_std
    own = torch.zeros(CODE, c.hidden_size)
    own[:, 1:OWN] = torch.linalg.qr(torch.randn(OWN - 1, CODE))[0].T
    first, second, *_ = (layer for layer in model.model.layers if isinstance(layer, Layer))
    look_back(first.self_attn, model.frequencies, math.sqrt(SHARPNESS) * spread / BIAS_VALUE)
    slots = write_slots(first.self_attn, own, spread * c.embedding_std)
    match_codes(second.self_attn, own, slots)
    for layer in list(model.model.layers)[1:]:
        assert isinstance(layer, Layer)
        layer.self_attn.o_proj.weight.normal_(std=0.5 * c.embedding_std * c.head_dim**-0.5)


def look_back(attention: Attention, frequencies: Tensor, amplitude: float) -> None:
    """Head j attends j + 1 tokens back: its constant query is a constant key turned so far."""
    half = attention.head_dim // 2
    attention.q_proj.weight.zero_()
    attention.k_proj.weight.zero_()
    for keys in attention.k_proj.weight.split(attention.head_dim):
        keys[:FASTEST, 0] = amplitude
    for head, queries in enumerate(attention.q_proj.weight.split(attention.head_dim)):
        angles = -(head + 1) * frequencies[:FASTEST]
        queries[:FASTEST, 0] = amplitude * angles.cos()
        queries[half : half + FASTEST, 0] = amplitude * angles.sin()


def write_slots(attention: Attention, own: Tensor, scale: float) -> list[Tensor]:
    """Let each head write the code it sees; returns what reads each slot, [CODE, hidden]."""
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
    for group, slot in enumerate((slots[0], slots[2])):
        keys[group * attention.head_dim + slow] += MATCH_GAIN * slot
    reads = (own, slots[0], slots[1], slots[2], slots[2], slots[1], slots[3], own)
    for head, read in enumerate(reads):
        queries[head * attention.head_dim + slow] += MATCH_GAIN * read
