"""Policies over queries logged in 4 bits, on the real engine: true scores, and the same scores
however a sequence is computed."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve.engine.policies.kara import Kara
from tests.checkpoints import write_checkpoint
from tests.engine.compression.test_remainder import COMPANY
from tests.engine.policies.cases import Case
from tests.engine.policies.test_conformance import Lab, Run, again, equal_vectors, same

_KARA: dict[str, Any] = {"window": 20, "buffer": 4, "ratio": 0.4, "period": 5}
_OTHER = {"ratio": 0.3, "query_reduce": "heads"}
_RECOMPUTED = {"query_source": "recompute", "query_stride": 2, "remainder": "off"}
_STRIDED: dict[str, Any] = {"period": 3, "remainder": "off"}
"""One query of so many: windows of two, of three that overlap by more than they move on by, of four
that begin at a prompt's start; the last by the newest tokens' queries alone."""
STRIDED = [
    Case("kara", {**_STRIDED, "ratio": 0.45, "window": 20, "buffer": 4, "query_stride": 2}, []),
    Case("kara", {**_STRIDED, "ratio": 0.35, "window": 27, "buffer": 18, "query_stride": 3}, []),
    Case(
        "kara",
        {
            **{**_STRIDED, "ratio": 0.55, "protect_prompt": False},
            **{"window": 32, "buffer": 8, "query_stride": 4},
        },
        [],
    ),
    Case(
        "kara",
        {
            **{**_STRIDED, "ratio": 0.5, "queries": "buffer", "protect_prompt": False},
            **{"window": 36, "buffer": 16, "query_stride": 2},
        },
        [],
    ),
]
SUMMED = [
    Case(
        "kara", {"window": 16, "buffer": 8, "ratio": 0.6, "score_every": 8, "remainder": "off"}, []
    ),
    Case(
        "kara",
        {
            **{"window": 24, "buffer": 8, "ratio": 0.3, "score_every": 8, "remainder": "off"},
            **{"chunk_budget": 1, "max_chunk": 3, "group_aggregate": "mean"},
        },
        [],
    ),
]
"""Scores are added up: an event of whole windows evicts, one of 8 tokens does not."""
_THRESHOLD = {"trigger": "threshold", "query_dtype": "int4", "attention": "absolute"}
CASES = [
    Case("kara", {**_KARA, "remainder": "off"}, [(57, 48), (77, 59)]),
    Case("kara", _KARA, []),
    Case("kara", {**_KARA, "remainder": "off", "chunk_budget": 0, "group_aggregate": "max"}, []),
    Case("kara", {**_KARA, "group_aggregate": "rms", "query_stride": 2, "buffer": 0}, []),
    Case("kara", {**_KARA, "ratio": 0.3, "remainder": "fitted"}, []),
    Case("kara", {**_KARA, **_OTHER, "queries": "buffer", "protect_prompt": False}, []),
    Case("kara", {**_KARA, **_OTHER, **_RECOMPUTED}, []),
    Case("snapkv", {"budget": 14, "threshold": 22, "window": 4, **_THRESHOLD}, []),
    Case("snapkv", {"budget": 18, "window": 5, "query_dtype": "int4"}, []),
    Case(
        "rkv", {"budget": 24, "threshold": 40, "query_dtype": "int4", "attention": "absolute"}, []
    ),
    *SUMMED,
    *STRIDED,
]
LABELS = [case.label for case in CASES]
EACH = pytest.mark.parametrize("label", LABELS)


@pytest.fixture(scope="module", params=["model", pytest.param("head", marks=pytest.mark.slow)])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Four query heads for each KV head."""
    checkpoint = write_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    return Lab(checkpoint, request.param, "auto", CASES, "int4")


@pytest.mark.parametrize("case", [CASES[0], *STRIDED], ids=lambda case: case.label)
def test_scores_are_the_attention_of_the_true_queries(lab: Lab, case: Case) -> None:
    """Absolute attention, query by query: over all that a head held when the query ran, and over
    what came after it. Without what the head held before the window, scores would be several times
    as large."""
    run = lab.alone(case.label)
    events = [(event.seen, event.held.shape[2]) for event in run.events]
    assert events == case.events or (len(events) > 1 and not case.events)
    policy = case.make()
    assert isinstance(policy, Kara)
    expected = expected_scores(lab, run, case.label, policy)
    for (absolute, within), choice in zip(expected, run.choices, strict=True):
        torch.testing.assert_close(choice.scores[0], absolute, rtol=0.05, atol=1e-3)
        assert (within / absolute).median() > (2 if policy.protect_prompt else 0.9)


@pytest.mark.usefixtures("few_newest", "some_text")
def test_the_buffer_is_read_on_as_computed(tmp_path: Path) -> None:
    """Beside entries in few bits, as behind an event of a whole window's queries."""
    directory, case = write_checkpoint("llama", tmp_path, head_dim=32), SUMMED[1]
    lab = Lab(directory, "model", "k3v3", [case], "int4")
    assert lab.intact(case.label) == case.spec["buffer"]
    run, dense = lab.alone(case.label), lab.dense(case.label)
    torch.testing.assert_close(run.logits, dense.logits[-len(run.logits) :], rtol=0, atol=1e-3)
    for layer, stored in lab.levels(run).items():
        for mine, x in zip(stored, dense.exact[layer], strict=True):
            assert equal_vectors(mine, again(mine, x)).float().mean() > 0.99


@pytest.mark.parametrize("case", SUMMED, ids=lambda case: case.label)
def test_scores_add_up(lab: Lab, case: Case) -> None:
    """Each query scores all uncompressed entries that are there when the next event comes; what it
    gave them is added to their scores, which the buffer takes into the next window."""
    run, kara = lab.alone(case.label), case.make()
    assert isinstance(kara, Kara) and kara.score_every == 8
    dense, choices = lab.dense(case.label), run.choices
    layers, kv_heads, _, dim = dense.keys.shape
    queries = dense.queries.unflatten(1, (kv_heads, -1)) * dim**-0.5
    held = np.tile(np.arange(run.events[0].seen), (layers, kv_heads, 1))
    sums = torch.zeros(layers, kv_heads, 0, dtype=torch.float64)
    assert len(run.events) > 4 and run.details.compactions > 1
    for event, choice, after in zip(run.events, choices, [*run.events[1:], None], strict=True):
        start, length = int(choice.plan.region_start[0]), int(choice.plan.window_len[0])
        new = torch.zeros(layers, kv_heads, length, dtype=torch.float64)
        for layer, head in np.ndindex(layers, kv_heads):
            now = torch.from_numpy(held[layer, head]).long()
            window, keys = now[start : start + length], dense.keys[layer, head]
            of_heads = torch.zeros(queries.shape[2], length, dtype=torch.float64)
            for member, place in product(range(queries.shape[2]), window[-8:].tolist()):
                query = queries[layer, head, member, place]
                found = probabilities(query, keys, place, now, window, length, 8)
                of_heads[member] += found[0] ** 2
            rms = of_heads.square().mean(0).sqrt()
            new[layer, head] = of_heads.mean(0) if kara.group_aggregate == "mean" else rms
        new[..., : sums.shape[-1]] += sums
        torch.testing.assert_close(choice.scores[0].double(), new, rtol=0.05, atol=1e-3)
        evicts = length == kara.window
        assert event.held.shape[2] == held.shape[2] - evicts * (length - kara.keep - kara.buffer)
        sums = new[..., -kara.buffer :] if evicts else new
        if after is not None:
            tokens = np.arange(event.seen, after.seen)
            held = np.concatenate([event.held, np.tile(tokens, (layers, kv_heads, 1))], axis=2)


def expected_scores(lab: Lab, run: Run, label: str, kara: Kara) -> list[tuple[Tensor, Tensor]]:
    """[L, Hkv, n] of each event, of absolute attention and of that within the window."""
    dense, first = lab.dense(label), run.events[0].seen
    layers, kv_heads, _, dim = dense.keys.shape
    queries = dense.queries.unflatten(1, (kv_heads, -1)) * dim**-0.5
    held, found = np.tile(np.arange(first), (layers, kv_heads, 1)), []
    held_then, last_seen = held, 0
    for event, choice in zip(run.events, run.choices, strict=True):
        start, length = int(choice.plan.region_start[0]), int(choice.plan.window_len[0])
        scores = torch.zeros(2, layers, kv_heads, length)
        for layer, head in np.ndindex(layers, kv_heads):
            now, then = (torch.from_numpy(x[layer, head]).long() for x in (held, held_then))
            window = now[start : start + kara.window]
            of_heads = torch.zeros(2, queries.shape[2], length, dtype=torch.float64)
            scoring = window[list(kara.query_places(kara.window))]
            for member, place in product(range(queries.shape[2]), scoring.tolist()):
                # The window's first queries ran before the last event.
                seen = then if place < last_seen else now
                query, keys = queries[layer, head, member, place], dense.keys[layer, head]
                of_heads[:, member] += probabilities(query, keys, place, seen, window, length) ** 2
            scores[:, layer, head] = of_heads.square().mean(1).sqrt().float()
        found.append((scores[0], scores[1]))
        held_then, last_seen = held, event.seen
        new = np.arange(event.seen, run.details.logical_tokens)
        held = np.concatenate([event.held, np.tile(new, (layers, kv_heads, 1))], axis=2)
    return found


def probabilities(
    query: Tensor,
    keys: Tensor,
    place: int,
    seen: Tensor,
    window: Tensor,
    length: int,
    span: int | None = None,
) -> Tensor:
    """What a query gives the window's first ``length`` entries, absolute and within the window.

    The log has its numbers in 4 bits, and which share of its attention the newest entries got from
    it as it was; what it gave all that it saw follows from both. The newest are those from the last
    multiple of ``span`` on (default: of ``length``).
    """
    step = (query.abs().max() / 7).half().float()
    exact, rounded = ((keys @ x).double().exp() for x in (query, (query / step).round() * step))
    seen = seen[seen <= place]
    recent = seen[seen >= place - (place - int(window[0])) % (span or length)]
    share = exact[recent].sum() / exact[seen].sum()
    own, later = rounded[window].sum(), rounded[window[window > place]].sum()
    total = torch.maximum(rounded[recent].sum() / share + later, own)
    return rounded[window[:length]] / torch.stack([total, own])[:, None]


@EACH
@pytest.mark.parametrize("company", [each for each in COMPANY if each != "guesses"])
def test_company_does_not_matter(lab: Lab, label: str, company: str) -> None:
    same(lab.alone(label), COMPANY[company](lab)[label])
