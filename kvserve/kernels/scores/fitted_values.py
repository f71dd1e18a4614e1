"""Fitted values of kept entries: changed so that they make up for the dropped ones."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 0.01
"""Share of the mean diagonal; ten times more or less measured the same."""


def fitted_values(
    probs: Tensor,
    values: Tensor,
    kept: Tensor,
    beside: Tensor | None = None,
    ridge: float = RIDGE,
) -> Tensor:
    """Values near the old ones with which the queries' outputs change least.

    probs: float32 [..., Q, n], what each query gives each entry; values: [..., n, D]; kept: int64
    [..., N], entries that stay; ``beside [..., Q, D]`` is what queries get from the others'
    remainder. Minimises ``|P_kept V' + beside - P V|^2 + ridge d |V' - V_kept|^2``, d being the
    mean diagonal of ``P_kept^T P_kept``. Returns V': float32 [..., N, D]. The idea is that of
    attention matching (arXiv 2602.16284), without its biases, which attention kernels would need.
    """
    values = values.float()
    keys = probs.gather(-1, kept[..., None, :].expand(*probs.shape[:-1], -1))
    old = values.gather(-2, kept[..., None].expand(*kept.shape, values.shape[-1]))
    normal = keys.transpose(-1, -2) @ keys
    diagonal = normal.diagonal(dim1=-2, dim2=-1)
    # If no query attends to the entries, the tiny term keeps the matrix regular.
    diagonal += ridge * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(torch.float32).tiny ** 0.5
    lost = probs @ values - keys @ old
    lacking = keys.transpose(-1, -2) @ (lost if beside is None else lost - beside)
    # Not `cholesky`, which waits for the device to learn whether it has failed.
    factor, _ = torch.linalg.cholesky_ex(normal)
    return old + torch.cholesky_solve(lacking, factor)
