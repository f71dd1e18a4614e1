"""Keys scored by where queries usually point (TriAttention, arXiv 2604.04921).

Before RoPE the queries of a head gather around a centre. An entry's score is how much a query at
the centre would attend to it, from the places that are still to come: one product of the stored key
with a vector per head, and one product of norms. Neither positions of entries nor angles are
needed, since the stored key is rotated already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvserve.kernels.calls import Compiled
from kvserve.kernels.checks import runs_triton
from kvserve.late import Late

OFFSETS = tuple(2**i for i in range(17))
"""How far ahead of the newest token the queries are that scores stand for (section 4)."""
_COMPILED = Compiled("centre_scores")
_centre_scores_triton = Late("kernels.score.centre_scores_triton:centre_scores_triton")
_SMALLEST = 1e-6
"""The least deviation that scores are divided by."""


@dataclass(frozen=True, slots=True)
class Centres:
    """Of the queries of L layers before RoPE, as pairs of dimensions (f, f + D/2).

    ``mean`` float32 [L, Hq, D]: the mean query. ``spread`` float32 [L, Hq, D/2]: the mean magnitude
    of each pair without that of the mean query. ``frequencies`` float32 [L, D/2]: RoPE's, in
    radians a position. ``factor``: what RoPE multiplies queries and keys by (YaRN).
    """

    mean: Tensor
    spread: Tensor
    frequencies: Tensor
    factor: float = 1.0

    @classmethod
    def of(cls, mean: Tensor, magnitude: Tensor, frequencies: Tensor, factor: float) -> Centres:
        """``magnitude`` float32 [L, Hq, D/2]: the mean magnitude of each pair."""
        both = mean.unflatten(-1, (2, -1)).norm(dim=-2)
        return cls(mean, (magnitude - both) * factor, frequencies, factor)

    def of_layers(self, layers: Tensor) -> Centres:
        """Of the layers ``layers [L']``."""
        return self._each(lambda x: x.index_select(0, layers))

    def to(self, device: torch.device) -> Centres:
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Centres:
        parts = change(self.mean), change(self.spread), change(self.frequencies)
        return Centres(*parts, self.factor)

    def seen_from(self, positions: Tensor, future: str) -> Tensor:
        """The centres rotated to ``OFFSETS`` behind ``positions [E]``: [E, L, Hq, V, D].

        With future ``mean`` one vector stands for all offsets (V = 1): products are linear. With
        ``max`` each has its own. Angles are float64: a million positions are many turns.
        """
        offsets = torch.tensor(OFFSETS, device=positions.device)
        places = (positions[:, None] + offsets).double()[:, None, :, None]
        angles = places * self.frequencies.double()[:, None, :]  # [E, L, V, D/2]
        cos, sin = angles.cos(), angles.sin()
        if future == "mean":
            cos, sin = (x.mean(dim=2, keepdim=True) for x in (cos, sin))
        cos, sin = (x[:, :, None].to(self.mean.dtype) * self.factor for x in (cos, sin))
        real, imaginary = self.mean[None, :, :, None].chunk(2, dim=-1)
        turned = real * cos - imaginary * sin, real * sin + imaginary * cos
        return torch.cat(turned, dim=-1)

    def scores(self, key: Tensor, positions: Tensor, future: str, normalise: bool) -> Tensor:
        """``centre_scores`` of keys, as ``seen_from``."""
        return centre_scores(key, self.seen_from(positions, future), self.spread, normalise)


def centre_scores(key: Tensor, vectors: Tensor, spread: Tensor, normalise: bool = True) -> Tensor:
    """Scores of keys [E, L, Hkv, n, D], best of each KV head's query heads: float32 [E, L, Hkv, n].

    A head's score is the best product with one of its ``vectors`` float32 [E, L, Hq, V, D], plus
    that of the magnitudes of the key's pairs with ``spread`` float32 [L, Hq, D/2]. ``normalise``:
    each head's scores have mean 0 and deviation 1 over the n keys.
    """
    if _COMPILED.takes(key, torch.float32, torch.bfloat16, multiple=16):
        return centre_scores_cpu(key, vectors, spread, normalise)
    find = _centre_scores_triton if runs_triton(key) else centre_scores_by_head
    return _best(find(key, vectors, spread), key.shape[2], normalise)


def centre_scores_torch(
    key: Tensor, vectors: Tensor, spread: Tensor, normalise: bool = True
) -> Tensor:
    """The reference of ``centre_scores``, in the dtype of ``vectors``."""
    return _best(centre_scores_by_head(key, vectors, spread), key.shape[2], normalise)


def centre_scores_cpu(
    key: Tensor, vectors: Tensor, spread: Tensor, normalise: bool = True
) -> Tensor:
    """Keys are float32 or bfloat16, of up to 256 dimensions, a multiple of 16."""
    events, layers, kv_heads, length, dim = key.shape
    vectors, spread = (x.float().contiguous() for x in (vectors, spread))
    out = torch.empty(events, layers, kv_heads, length)
    _COMPILED(
        *(key, vectors, spread, out, key.stride()[:4]),
        *(events, layers, vectors.shape[2], kv_heads, vectors.shape[3], length, dim),
        *(normalise, key.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return out


def centre_scores_by_head(key: Tensor, vectors: Tensor, spread: Tensor) -> Tensor:
    """Each query head's scores: [E, L, Hq, n]."""
    kv_heads = key.shape[2]
    key = key.to(vectors.dtype)
    grouped = vectors.unflatten(2, (kv_heads, -1)).flatten(3, 4)  # [E, L, Hkv, G * V, D]
    products = grouped @ key.transpose(-1, -2)
    best = products.unflatten(3, (-1, vectors.shape[3])).amax(dim=4).flatten(2, 3)
    magnitudes = key.unflatten(-1, (2, -1)).norm(dim=-2)  # [E, L, Hkv, n, D/2]
    rest = spread.unflatten(1, (kv_heads, -1)) @ magnitudes.transpose(-1, -2)
    return best + rest.flatten(2, 3)


def _best(scores: Tensor, kv_heads: int, normalise: bool) -> Tensor:
    if normalise:
        deviation, mean = torch.std_mean(scores, dim=-1, correction=0, keepdim=True)
        scores = (scores - mean) / deviation.clamp(min=_SMALLEST)
    return scores.unflatten(2, (kv_heads, -1)).amax(dim=3)
