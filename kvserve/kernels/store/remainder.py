"""What stands for the entries that a row has lost: one entry with a weight for each lane.

A softmax over the kept entries alone overweights them. An entry with the mean key and value of n
dropped ones, and log n added to its logit, stands for what they added to the softmax's sum: the sum
of exp(q . k) over n alike keys is n exp(q . mean). Attention begins its online softmax with this
entry: (q . k + bias, 1, v) instead of (-inf, 0, 0).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Remainder(NamedTuple):
    """``keys``, ``values`` [..., Hkv, D] and ``bias`` [..., Hkv], the logarithm of what each entry
    weighs: -inf where there is none. For attention, float32 [rows, Hkv, ...] of one layer."""

    keys: Tensor
    values: Tensor
    bias: Tensor

    def at(self, *index: Tensor | slice | int) -> Remainder:
        """The entries at an index of the leading dimensions."""
        return Remainder(*(part[index] for part in self))

    def numbers(self) -> tuple[Tensor, Tensor]:
        """float32 keys and values; 0 where there is none."""
        there = (self.bias > -torch.inf)[..., None]
        keys, values = (torch.where(there, x.float(), 0.0) for x in (self.keys, self.values))
        return keys, values


def merged(first: Remainder, second: Remainder) -> Remainder:
    """Both as one, in float32: weights add up, keys and values are means by weight."""
    bias = torch.logaddexp(first.bias, second.bias)
    # Nothing and nothing is nothing, not NaN.
    share = torch.exp(second.bias - bias).nan_to_num(0.0)[..., None]
    (keys, values), (more_keys, more_values) = first.numbers(), second.numbers()
    return Remainder(keys.lerp(more_keys, share), values.lerp(more_values, share), bias)


def logits_with(
    logits: Tensor, query: Tensor, remainder: Remainder, scale: float, soft_cap: float = 0.0
) -> Tensor:
    """``logits`` [..., Hkv, group, Q, n] with one more column: that of the remainder [..., Hkv].

    query: [..., Hq, Q, D].
    """
    keys, _ = remainder.numbers()
    folded = query.float().unflatten(-3, (keys.shape[-2], -1))
    own = capped(torch.einsum("...gqd,...d->...gq", folded, keys) * scale, soft_cap)
    return torch.cat([logits, (own + remainder.bias[..., None, None])[..., None]], dim=-1)


def capped(logits: Tensor, soft_cap: float) -> Tensor:
    """``soft_cap`` tanh(x / ``soft_cap``) of each logit x; the logits themselves if it is 0."""
    return torch.tanh(logits / soft_cap) * soft_cap if soft_cap else logits
