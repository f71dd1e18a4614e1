"""Window scores against the spec's worked numbers and a naive loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from kvserve.kernels.checks import AGGREGATES, GQA_REDUCTIONS
from kvserve.kernels.score.causal_scores import causal_scores, past_scores
from kvserve.kernels.score.window_scores import window_scores, window_scores_torch
from kvserve.kernels.score.window_scores_triton import window_scores_triton
from tests.thinning import thinned

KEYS = torch.tensor([[[0.0], [math.log(2)], [math.log(3)]]])
QUERIES = torch.tensor([[[1.0], [0.0], [-1.0], [1.0]], [[0.0]] * 4])


def test_worked_example() -> None:
    heads = window_scores(QUERIES, KEYS, scale=1.0)
    torch.testing.assert_close(heads, torch.tensor([[1.2727, 1.3030, 1.4242]]), atol=1e-4, rtol=0)
    mean = window_scores(QUERIES.mean(0, keepdim=True), KEYS, scale=1.0)
    torch.testing.assert_close(mean, torch.tensor([[1.2534, 1.3250, 1.4215]]), atol=1e-4, rtol=0)
    single = window_scores(QUERIES[:1], KEYS, scale=1.0)
    torch.testing.assert_close(single, torch.tensor([[1.2121, 1.2727, 1.5152]]), atol=1e-4, rtol=0)


def test_invariants() -> None:
    """Rows sum to W; query order does not matter; permuted keys give permuted scores."""
    torch.manual_seed(1)
    q, k = torch.randn(4, 9, 8), torch.randn(2, 6, 8)
    scores = window_scores(q, k, 0.3)
    torch.testing.assert_close(scores.sum(-1), torch.full((2,), 9.0))
    shuffled = q[:, torch.randperm(9)]
    torch.testing.assert_close(window_scores(shuffled, k, 0.3), scores)
    order = torch.randperm(6)
    torch.testing.assert_close(window_scores(q, k[:, order], 0.3), scores[:, order])


# ---- scores of the entries before the window ----------------------------------------------------

GQA_SHAPES = [(1, 1), (2, 1), (2, 3), (1, 4), (3, 2)]
REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "sum": lambda x: x.sum(0),
}


def naive_causal(q: Tensor, k: Tensor, scale: float, reduce: str) -> Tensor:
    """q: [Hq, W, D]; k: [Hkv, n, D]; one query at a time."""
    group, window, past = len(q) // len(k), q.shape[1], k.shape[1] - q.shape[1]
    votes = torch.zeros(len(q), past)
    for head, i in product(range(len(q)), range(window)):
        logits = k[head // group, : past + i + 1] @ q[head, i] * scale
        votes[head] += torch.softmax(logits, dim=0)[:past] / window
    return torch.stack([REDUCE[reduce](heads) for heads in votes.split(group)])


def naive_past(q: Tensor, k: Tensor, scale: float, reduce: str) -> Tensor:
    group, window, past = len(q) // len(k), q.shape[1], k.shape[1] - q.shape[1]
    votes = torch.zeros(len(k), past)
    for head, i in product(range(len(k)), range(window)):
        queries = q[head * group : (head + 1) * group, i]
        logits = torch.stack([k[head, :past] @ query * scale for query in queries])
        votes[head] += torch.softmax(REDUCE[reduce](logits), dim=0) / window
    return votes


@pytest.mark.parametrize("reduce", GQA_REDUCTIONS)
@pytest.mark.parametrize(("kv_heads", "group"), GQA_SHAPES)
@pytest.mark.parametrize(
    ("scores", "naive"), [(causal_scores, naive_causal), (past_scores, naive_past)]
)
def test_scores_before_the_window_against_naive_loops(
    scores: Callable[..., Tensor],
    naive: Callable[..., Tensor],
    kv_heads: int,
    group: int,
    reduce: str,
) -> None:
    torch.manual_seed(kv_heads * 10 + group)
    for window, length in ((1, 2), (4, 5), (3, 11)):
        q = torch.randn(2, 2, kv_heads * group, window, 4)
        k = torch.randn(2, 2, kv_heads, length, 4)
        got = scores(q, k, 0.7, reduce)
        assert got.shape == (2, 2, kv_heads, length - window)
        for e, layer in product(range(2), range(2)):
            expected = naive(q[e, layer], k[e, layer], 0.7, reduce)
            torch.testing.assert_close(got[e, layer], expected, atol=1e-5, rtol=1e-5)


def test_the_two_scopes_differ_on_the_worked_example() -> None:
    """Two grouped queries: past prefers what one of them likes, causal what both do."""
    keys = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.8, 0.8], [0.0, 0.0]]])
    queries = torch.tensor([[[2.0, 0.0]], [[0.0, 2.0]]])
    scale = 1 / math.sqrt(2)
    past = past_scores(queries, keys, scale)
    torch.testing.assert_close(past, torch.tensor([[0.363, 0.363, 0.274]]), atol=5e-4, rtol=0)
    causal = causal_scores(queries, keys, scale)
    torch.testing.assert_close(causal, torch.tensor([[0.278, 0.278, 0.337]]), atol=1e-3, rtol=0)


def test_window_queries_do_not_see_later_keys() -> None:
    """Numbers of ChunkKV's example: numerators 3 3 1 8 1 1 1 over 18, then 3 3 1 8 1 1 1 1 / 19."""
    keys = torch.zeros(1, 8, 4)
    keys[0, :, 0] = torch.log(torch.tensor([3.0, 3.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0]))
    queries = torch.zeros(1, 2, 4)
    queries[..., 0] = 2.0
    total = 2 * causal_scores(queries, keys, scale=0.5)
    expected = torch.tensor([[0.3246, 0.3246, 0.1082, 0.8655, 0.1082, 0.1082]])
    torch.testing.assert_close(total, expected, atol=5e-5, rtol=0)


# ---- by Triton, in two passes -------------------------------------------------------------------

TRITON = pytest.mark.usefixtures("device")


@TRITON
@thinned(
    {
        "aggregate": AGGREGATES,
        "group": [1, 3],
        "dim,window,keys,dtype": [
            (64, 70, 130, torch.float32),
            (128, 5, 90, torch.float16),
            (16, 65, 1, torch.float32),
            (128, 70, 130, torch.bfloat16),
        ],
    }
)
def test_triton(
    dim: int, window: int, keys: int, dtype: torch.dtype, group: int, aggregate: str
) -> None:
    if dtype is torch.bfloat16 and not torch.cuda.is_available():
        pytest.skip("the interpreter rounds bfloat16 otherwise")
    # Lanes in the order in which they are gathered, [L, heads, E, S, D], seen event by event.
    q = torch.randn(2, 2 * group, 1, window, dim).permute(2, 0, 1, 3, 4).to(dtype)
    k = torch.randn(2, 2, 1, keys, dim).permute(2, 0, 1, 3, 4).to(dtype)
    found = window_scores_triton(q, k, 0.2, aggregate)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.2, aggregate))
    if aggregate == "sum":
        torch.testing.assert_close(found.sum(-1), torch.full(found.shape[:-1], float(window)))


@TRITON
def test_every_e4m3_number_is_widened_exactly() -> None:
    """Also by the interpreter, which is wrong about arithmetic in it and casts to it; and queries
    may be of another type than keys."""
    codes = torch.arange(256, dtype=torch.uint8) % 0x7F  # the two codes of nan are left out
    codes[128:] += 128
    q, k = codes.view(torch.float8_e4m3fn).view(1, 16, 16), torch.eye(16)[None] / 64
    expected = window_scores_torch(q.float(), k, 1.0, "max")
    for query, key in ((q, k), (q, k.half()), (q.float(), k.half())):
        torch.testing.assert_close(window_scores_triton(query, key, 1.0, "max"), expected)


@TRITON
def test_nothing_to_score() -> None:
    assert window_scores_triton(torch.randn(2, 4, 16), torch.randn(2, 0, 16), 1.0).shape == (2, 0)
