"""Remainders on the real engine: logits, kept sets and what stands for dropped entries, against a
reference in float64 that evicts for real; and the same however a sequence is computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM
from kvserve.engine.policies.base import PolicyError
from kvserve.engine.policies.registry import make_policy
from kvserve.entry_format import FORMATS
from tests.checkpoints import write_checkpoint
from tests.engine.dense_reference import load_dense
from tests.engine.evicting_reference import (
    EvictingPass,
    Fit,
    as_arrays,
    evicting_pass,
    fitted,
    mean,
)
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.engine.policies.cases import PROMPT, UNEVEN_BLOCK, UNEVEN_CASES, Case
from tests.engine.policies.test_conformance import IDS, Lab, Run, generate, same
from tests.engine.policies.uneven.test_uneven_engine import alone
from tests.thinning import thinned

_KARA: dict[str, Any] = {"window": 16, "buffer": 4, "ratio": 0.25, "period": 4}
_MODEL = {"query_dtype": "model"}
_BOUND = {"budget": 14, "threshold": 20, "trigger": "threshold"}
_ALL = {"protect_prompt": False}
CASES = [
    Case("kara", {**_KARA, **_MODEL, "remainder": "mean"}, []),
    Case("kara", {**_KARA, **_MODEL, "remainder": "fitted", "attention": "window"}, []),
    Case(
        "kara",
        {
            **{**_KARA, "buffer": 0, "chunk_budget": 0},
            **{"query_source": "recompute", "query_reduce": "heads", "remainder": "mean"},
        },
        [],
    ),
    Case("snapkv", {**_BOUND, **_ALL, "window": 4, "remainder": "fitted"}, []),
    Case("rkv", {"budget": 24, "threshold": 32, "window": 4, "remainder": "mean"}, []),
    Case("chunkkv", {**_BOUND, "window": 4, "chunk_size": 3, "remainder": "mean"}, []),
    Case("keydiff", {**_BOUND, "remainder": "mean"}, []),
    Case("streaming_llm", {"budget": 16, "sinks": 3, "period": 4, "remainder": "mean"}, []),
    Case("h2o", {"budget": 20, "remainder": "mean"}, []),
    Case("snapkv", {"budget": 18, "window": 5, "remainder": "fitted"}, []),
]
LABELS = [case.label for case in CASES]
EACH = pytest.mark.parametrize("case", CASES, ids=LABELS)


@pytest.fixture(
    scope="module",
    params=[
        ("llama", "model", "auto"),
        pytest.param(("qwen3", "model", "k4v4"), marks=pytest.mark.slow),
        pytest.param(("qwen3", "model", "k8v4"), marks=pytest.mark.slow),
        pytest.param(("qwen3", "layer", "auto"), marks=pytest.mark.slow),
        pytest.param(("llama", "head", "int8"), marks=pytest.mark.slow),
        pytest.param(("qwen3", "head", "fp8"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, few_newest: None
) -> Lab:
    kind, layout, form = request.param
    directory = write_checkpoint(kind, tmp_path_factory.mktemp(kind))
    return Lab(directory, layout, form, [*CASES], "model")


def fit_of(case: Case, run: Run) -> Fit:
    """How the reference makes what is left of an event."""
    if case.fields["remainder"] == "mean":
        return mean
    if case.policy == "snapkv":
        last = [event.seen for event in run.events]
        window = case.fields["window"]
        return fitted(lambda e: (list(range(last[e] - window, last[e])), None))
    starts = [int(choice.plan.region_start[0]) for choice in run.choices]
    logical = [int(choice.plan.query_start[0]) for choice in run.choices]
    window, scored = case.fields["window"], case.fields["window"] - case.fields["buffer"]
    return fitted(
        lambda e: (
            list(range(logical[e], logical[e] + window)),
            list(range(starts[e], starts[e] + scored)),
        )
    )


@cache
def reference(lab: Lab, label: str) -> tuple[Run, EvictingPass]:
    run, form = lab.alone(label), FORMATS.get(lab.form)
    case = lab.cases[label]
    ids, fit, held = IDS + run.tokens[:-1], fit_of(case, run), lab.held(run)
    how = fit, form, held, lab.intact(label)
    found = evicting_pass(load_dense(lab.directory), ids, run.events, *how)
    return run, found


@EACH
def test_logits_are_those_of_attention_that_evicts(lab: Lab, case: Case) -> None:
    run, found = reference(lab, case.label)
    at_once = case.policy == "snapkv" and "threshold" not in case.fields
    assert len(run.events) >= (1 if at_once else 3)
    within = 2 * lab.within
    expected = found.logits[PROMPT - 1 :].float()
    torch.testing.assert_close(run.logits, expected, atol=within, rtol=within)


@EACH
def test_a_remainder_changes_what_follows(lab: Lab, case: Case) -> None:
    """Or the comparison above would prove nothing."""
    run = lab.alone(case.label)
    (off,) = generate(lab._one, [(IDS, {**case.spec, "remainder": "off"})])
    first = run.events[0].seen - PROMPT + 1
    assert torch.equal(run.logits[:first], off.logits[:first])
    assert not torch.equal(run.logits[first], off.logits[first])


@EACH
def test_remainders_are_those_of_the_reference(lab: Lab, case: Case) -> None:
    _, found = reference(lab, case.label)
    layout = lab._one.llm.engine.core.runner.cache.layout
    expected = as_arrays(found, layout.num_layers, layout.num_kv_heads)
    generate(lab._one, [(IDS, case.spec)])
    for ours, theirs in zip(left_in_row(lab._one.llm, 0), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.float(), atol=lab.within, rtol=lab.within)


def left_in_row(llm: LLM, row: int) -> tuple[Tensor, ...]:
    """Keys, values [L, Hkv, D] and bias [L, Hkv] that a row was left with, as events see them."""
    remainders = llm.engine.core.runner.batch.remainders
    assert remainders is not None
    return tuple(part[0].float() for part in remainders.of(torch.tensor([row])))


COMPANY: dict[str, Callable[[Lab], dict[str, Run]]] = {
    "mates, chunks and blocks": lambda lab: lab.crowd,
    "preempted": lambda lab: lab.preempted(0),
    "swapped": lambda lab: lab.preempted(1),
    "chunks": lambda lab: lab.chunked(16, False),
    "hits": lambda lab: lab.chunked(16, True),
    "guesses": lambda lab: lab.guessed,
}


@EACH
@pytest.mark.parametrize("company", list(COMPANY))
def test_company_does_not_matter(lab: Lab, case: Case, company: str) -> None:
    same(lab.alone(case.label), COMPANY[company](lab)[case.label])


def test_usage_counts_what_is_left(lab: Lab) -> None:
    run = lab.alone(LABELS[0])
    layout = lab._one.llm.engine.core.runner.cache.layout
    lanes = layout.num_layers * layout.num_kv_heads
    assert run.details.remainder_entries == lanes
    (off,) = generate(lab._one, [(IDS, {**CASES[0].spec, "remainder": "off"})])
    assert off.details.remainder_entries == 0
    each = 2 * layout.head_dim * 4 + 4
    assert run.details.held_bytes == off.details.held_bytes + lanes * each


def test_a_budget_never_reached_leaves_nothing(lab: Lab) -> None:
    (full,) = generate(lab._one, [(IDS, "none")])
    (run,) = generate(lab._one, [(IDS, {**CASES[0].spec, "window": 200})])
    assert run.details.compactions == run.details.remainder_entries == 0
    assert run.tokens == full.tokens and torch.equal(run.logits, full.logits)


def test_several_windows_of_an_event_leave_one_remainder(tmp_path: Path) -> None:
    """A prompt's windows are all taken at its end; together they are as one after the other."""
    directory = write_checkpoint("llama", tmp_path)
    spec = {"name": "kara", **_KARA, **_MODEL, "protect_prompt": False, "remainder": "mean"}
    lab = Lab(directory, "model", "auto", [Case("kara", {**spec}, [])], "model")
    recorder = lab.engine(enable_prefix_caching=False)
    (run,) = generate(recorder, [(IDS, spec)])
    assert len(run.choices[0].scores) > 1
    found = evicting_pass(load_dense(directory), IDS + run.tokens[:-1], run.events, mean)
    within = 2 * lab.within
    torch.testing.assert_close(
        run.logits, found.logits[PROMPT - 1 :].float(), atol=within, rtol=within
    )
    for kind in ("mean", "fitted"):
        (run,) = generate(recorder, [(IDS, {**spec, "remainder": kind})])
        bias = left_in_row(recorder.llm, 0)[2]
        assert bias.isfinite().all() and np.diff([event.seen for event in run.events]).min() > 0


LEAVING = [
    *("pyramidkv-threshold", "adakv", "adakv-threshold", "adakv-keydiff"),
    *("dynamickv", "chunkkv-blocks", "windowkv"),
]


@thinned({"name": LEAVING, "kind": ["mean", "fitted"]})
def test_uneven_policies(tmp_path: Path, name: str, kind: str) -> None:
    """Lanes that drop differently many, and blocks that are dropped where they lie."""
    directory, spec = write_checkpoint("llama", tmp_path), {**UNEVEN_CASES[name], "remainder": kind}
    tokens, events, logits = alone(make(directory, policy=spec, block_size=UNEVEN_BLOCK), IDS)
    assert events
    policy = make_policy(spec).for_model(2, UNEVEN_BLOCK)
    fit: Fit = mean
    if policy.leaves == "fitted":
        ends = [event.seen for event in events]
        first = 0 if "threshold" not in name or not policy.protect_prompt else PROMPT  # type: ignore[attr-defined]
        fit = fitted(lambda e: (list(range(ends[e] - policy.protected, ends[e])), None), first)
    found = evicting_pass(load_dense(directory), IDS + tokens[:-1], events, fit)
    expected = found.logits[PROMPT - 1 :].float()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_backends_agree(tmp_path: Path) -> None:
    directory, answers = write_checkpoint("qwen3", tmp_path), []
    for backend in ("auto", "torch"):
        llm = make(directory, policy={"name": "kara", **_KARA}, attention_backend=backend)
        answers.append(tokens_of(llm, [IDS, IDS[:9], IDS[3:30]], 50))
        remainders = llm.engine.core.runner.batch.remainders
        assert remainders is not None and remainders.used
    assert answers[0] == answers[1]


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(PolicyError, match="remainder must be None or off or mean or fitted, got"):
        make_policy({"name": "kara", "remainder": "sum"})
    with pytest.raises(PolicyError, match="policy kara has no argument 'values'"):
        make_policy({"name": "kara", "values": "fitted"})
