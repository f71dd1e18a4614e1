"""Window scores against the spec's worked numbers and a naive loop."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from kvserve.kernels.checks import AGGREGATES
from kvserve.kernels.scores.causal_scores import GQA_REDUCTIONS, causal_scores, past_scores
from kvserve.kernels.scores.window_scores import window_scores, window_scores_torch
from kvserve.kernels.scores.window_scores_triton import window_scores_triton
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
REDUCE: dict[str, Callable[..., float]] = {
    "mean": lambda x: sum(x) / len(x),
    "max": max,
    "sum": sum,
}


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [x / sum(powers) for x in powers]


def naive_causal(q: torch.Tensor, k: torch.Tensor, scale: float, reduce: str) -> list[list[float]]:
    """q: [Hq, W, D]; k: [Hkv, n, D]; one query, one key at a time."""
    heads, window, length = q.shape[0], q.shape[1], k.shape[1]
    group = heads // k.shape[0]
    means = []
    for head in range(heads):
        votes = [0.0] * (length - window)
        for i in range(window):
            seen = range(length - window + i + 1)
            row = softmax([float(q[head, i] @ k[head // group, j]) * scale for j in seen])
            votes = [vote + row[j] / window for j, vote in enumerate(votes)]
        means.append(votes)
    groups = [means[at : at + group] for at in range(0, heads, group)]
    return [[REDUCE[reduce](column) for column in zip(*rows, strict=True)] for rows in groups]


def naive_past(q: torch.Tensor, k: torch.Tensor, scale: float, reduce: str) -> list[list[float]]:
    heads, window, length = q.shape[0], q.shape[1], k.shape[1]
    group = heads // k.shape[0]
    out = []
    for kv_head in range(k.shape[0]):
        votes = [0.0] * (length - window)
        for i in range(window):
            logits = []
            for j in range(length - window):
                mine = range(kv_head * group, (kv_head + 1) * group)
                dots = [float(q[head, i] @ k[kv_head, j]) * scale for head in mine]
                logits.append(REDUCE[reduce](dots))
            votes = [a + b / window for a, b in zip(votes, softmax(logits), strict=True)]
        out.append(votes)
    return out


@pytest.mark.parametrize("reduce", GQA_REDUCTIONS)
@pytest.mark.parametrize(("kv_heads", "group"), GQA_SHAPES)
@pytest.mark.parametrize(
    ("scores", "naive"), [(causal_scores, naive_causal), (past_scores, naive_past)]
)
def test_scores_before_the_window_against_naive_loops(
    scores: Callable[..., torch.Tensor],
    naive: Callable[..., list[list[float]]],
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
        for e in range(2):
            for layer in range(2):
                expected = torch.tensor(naive(q[e, layer], k[e, layer], 0.7, reduce))
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
def test_several_events_of_strided_lanes() -> None:
    q = torch.randn(3, 4, 2 * 20, 32).unflatten(2, (2, 20)).permute(2, 0, 1, 3, 4)
    k = torch.randn(3, 2, 2 * 24, 32).unflatten(2, (2, 24)).permute(2, 0, 1, 3, 4)[..., :17, :]
    found = window_scores_triton(q, k, 0.3)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.3))
    flat = window_scores_triton(q.flatten(0, 1), k.flatten(0, 1), 0.3)
    torch.testing.assert_close(flat, found.flatten(0, 1))


@TRITON
@pytest.mark.parametrize("query_dtype", [torch.float32, torch.float8_e4m3fn])
def test_queries_of_another_type_than_the_keys(query_dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 20, 32).to(query_dtype), torch.randn(2, 40, 32).half()
    found = window_scores_triton(q, k, 0.3)
    torch.testing.assert_close(found, window_scores_torch(q, k, 0.3))


@TRITON
def test_every_e4m3_number_is_widened_exactly() -> None:
    """Also by the interpreter, which is wrong about arithmetic in it and casts to it."""
    codes = torch.arange(256, dtype=torch.uint8) % 0x7F  # the two codes of nan are left out
    codes[128:] += 128
    q, k = codes.view(torch.float8_e4m3fn).view(1, 16, 16), torch.eye(16)[None] / 64
    found = window_scores_triton(q, k, 1.0, "max")
    torch.testing.assert_close(found, window_scores_torch(q.float(), k, 1.0, "max"))


@TRITON
def test_nothing_to_score() -> None:
    assert window_scores_triton(torch.randn(2, 4, 16), torch.randn(2, 0, 16), 1.0).shape == (2, 0)
