"""Inputs of a decoding step by the compiled kernel against the torch reference."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from kvserve.kernels.decode_inputs import decode_inputs_cpu, decode_inputs_torch
from tests.kernels.on_triton.test_triton_decode_inputs import (
    ROWS,
    assert_same,
    buffers,
    some_rows,
)
from tests.thinning import thinned

pytestmark = pytest.mark.compiler


@thinned(
    {
        "logs": [False, True],
        "groups,heads": [(1, 1), (3, 1), (3, 2), (33, 8)],
        "size,count": [(1, 1), (6, 6), (6, 4), (7, 1), (6, 0)],
        "block,log_block": [(4, 5), (16, 256), (64, 3)],
    },
    together=2,
    rest=False,
)
def test_inputs(
    groups: int, heads: int, size: int, count: int, logs: bool, block: int, log_block: int
) -> None:
    """Twice: the second step goes where the first one's count says."""
    rows = some_rows(groups, heads, block, log_block)
    other, known = deepcopy(rows), torch.tensor(count)
    for _ in range(2):
        found, expected = buffers(rows, size, logs), buffers(rows, size, logs)
        decode_inputs_cpu(rows, found, known)
        decode_inputs_torch(other, expected, known)
        assert_same(found, expected)
        assert_same(rows, other)


def test_refusals() -> None:
    rows = some_rows(2, 1)
    for wrong in (buffers(some_rows(1, 1), 3, False), buffers(rows, ROWS + 1, False)):
        with pytest.raises(ValueError, match="contiguous tensors that fit them"):
            decode_inputs_cpu(rows, wrong, torch.tensor(1))
