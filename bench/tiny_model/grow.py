"""Add a layer to a model in training: heads that look for where a name stood 4 tokens ago.

In the tasks' programs a line's name stands four tokens before its last operand (six with a label
before it), and no head of the structured start reads it there. The new layer begins with heads that
do: what reads the token some places back from the residual stream is fitted by least squares, codes
are compared in rotary dimensions that hardly turn, and what is seen is passed on as what comes
next. The rest of the layer begins silent.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tiny_model.model import Layer, TinyLlama

CODE = 16
KEY_OFFSET = 4
QUERY_OFFSETS = (4, 3, 5, 4)
MATCH_LOGIT = 36.0
COPY_GAIN = 0.5
RIDGE = 1e-2


@torch.no_grad()
def grow(model: TinyLlama, at: int, ids: Tensor, positions: Tensor) -> TinyLlama:
    """A model with one more layer at index `at`; ids, positions: [B, T], texts to fit on."""
    x = _input(model, at, ids, positions)
    c = model.config
    layer = Layer(c).to(ids.device)
    for parameter in layer.parameters():
        if parameter.ndim == 2:
            parameter.normal_(std=0.2 * c.hidden_size**-0.5)
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    layer.mlp.gate_proj.weight.mul_(5)
    layer.mlp.up_proj.weight.mul_(5)
    codes = _codes(c.vocab_size).to(ids.device)
    readers = {n: _fit(x, codes[ids], n) for n in {KEY_OFFSET, *QUERY_OFFSETS}}
    half, size = c.head_dim // 2, c.head_dim
    slow = torch.tensor([*range(half - CODE // 2, half), *range(size - CODE // 2, size)])
    gain = math.sqrt(MATCH_LOGIT * math.sqrt(size))
    layer.self_attn.k_proj.weight[slow] = gain * readers[KEY_OFFSET]
    embedding = model.model.embed_tokens.weight
    axes = torch.linalg.svd(embedding, full_matrices=False)[2][:size].T
    layer.self_attn.v_proj.weight[:size] = _fit(x, (embedding @ axes)[ids], 0)
    for head, offset in enumerate(QUERY_OFFSETS):
        layer.self_attn.q_proj.weight[head * size + slow] = gain * readers[offset]
        layer.self_attn.o_proj.weight[:, head * size : (head + 1) * size] = COPY_GAIN * axes
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([*layers[:at], layer, *layers[at:]])
    model.config = type(c)(**{**vars(c), "num_layers": c.num_layers + 1})
    return model


def _input(model: TinyLlama, at: int, ids: Tensor, positions: Tensor) -> Tensor:
    """What layer `at` would see, normalised: [B, T, hidden]."""
    angles = positions[:, None, :, None] * model.frequencies
    x = model.model.embed_tokens(ids)
    for layer in model.model.layers[:at]:
        x = layer(x, angles.cos(), angles.sin())
    return F.rms_norm(x, (x.shape[-1],), eps=model.config.rms_norm_eps)


def _codes(count: int) -> Tensor:
    """[count, CODE], of length 1, pushed apart."""
    codes = F.normalize(torch.randn(count, CODE), dim=1)
    for _ in range(200):
        near = (codes @ codes.T).fill_diagonal_(-1.0).mul(8.0).exp()
        codes = F.normalize(codes - 0.02 * near @ codes / near.mean(), dim=1)
    return codes


def _fit(x: Tensor, wanted: Tensor, back: int) -> Tensor:
    """[N, hidden]: reads from x: [B, T, hidden] what was `wanted`: [B, T, N] some tokens back."""
    length = x.shape[1]
    seen, target = x[:, back:].flatten(0, 1), wanted[:, : length - back].flatten(0, 1)
    square = seen.T @ seen
    square.diagonal().add_(RIDGE * square.diagonal().mean())
    return torch.linalg.solve(square, seen.T @ target).T
