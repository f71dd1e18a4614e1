"""Queries computed again at an event are those that the forward once had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.inspect import inspect
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make

KARA = {"name": "kara", "window": 20, "buffer": 4, "chunk_budget": 3, "max_chunk": 4, "period": 5}
LOGGED = {"query_source": "log", "query_dtype": "model"}  # recomputed queries are not rounded
RECOMPUTED = {"query_source": "recompute"}
(PROMPT,) = random_prompts([11], seed=3)


def running(directory: Path, tokens: int, **fields: Any) -> LLM:
    """An engine in the midst of a sequence, with ``tokens`` of them computed."""
    llm = make(directory, policy={**KARA, **LOGGED, **fields})
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    llm.engine.add_request("a", PROMPT, params)
    while llm.engine.core.scheduler.rows.num_computed[0] < tokens:
        llm.engine.step()
    return llm


def recomputed(llm: LLM, positions: list[int], heads: int) -> Tensor:
    """Of the only sequence, at logical positions behind everything evicted."""
    core = llm.engine.core
    rows, recomputer = core.scheduler.rows, core.runner.compressor.observer._recomputer
    at = np.array([positions])
    evicted = int(rows.num_computed[0]) - int(core.scheduler.blocks.kv_lens[0, 0, 0])
    with torch.inference_mode():
        found = recomputer.queries(np.zeros(1, int), rows.token_ids[0][at], at, at - evicted, heads)
    return found[0]


@pytest.mark.parametrize("events", [False, True])
def test_any_subset_equals_the_full_pass(llama_dir: Path, events: bool) -> None:
    llm = running(llama_dir, 78, window=20 if events else 100)
    assert (llm.stats().compactions_total > 2) is events
    start = int(llm.engine.core.scheduler.rows.first_uncompressed_pos[0])
    runner = llm.engine.core.runner
    before = runner.cache.kv.clone(), runner.batch.kv_lens.clone()
    full = recomputed(llm, list(range(start, 78)), 8)
    for subset in ([start], [77], [start + 1, start + 5, 77], list(range(77, start, -3))):
        found = recomputed(llm, subset, 8)
        places = torch.tensor(subset) - start
        torch.testing.assert_close(found, full[..., places, :], atol=1e-4, rtol=1e-4)
    assert torch.equal(runner.cache.kv, before[0]) and torch.equal(runner.batch.kv_lens, before[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"query_reduce": "heads"},
        {"query_stride": 2},
        {"queries": "buffer"},
        {"protect_prompt": False},
    ],
)
def test_the_first_event_keeps_what_logged_queries_would(
    llama_dir: Path, fields: dict[str, Any]
) -> None:
    """Later ones need not: the recomputed queries then see the compacted cache."""
    prompt, continuation = random_prompts([14, 36], seed=8)
    found = []
    for source in (LOGGED, RECOMPUTED):
        policy = {**KARA, "window": 20, "ratio": 0.4, **source, **fields}
        llm = make(llama_dir, policy=policy)
        found.append(inspect(llm, prompt, continuation))
        assert (llm.engine.core.scheduler.blocks.log.blocks.any()) == (source is LOGGED)
    log, recompute = (inspection.events[0] for inspection in found)
    assert log.seen == recompute.seen == (34 if fields != {"protect_prompt": False} else 24)
    assert np.array_equal(log.held, recompute.held)


def test_stride_and_buffer_choose_other_tokens(llama_dir: Path) -> None:
    prompt, continuation = random_prompts([14, 60], seed=8)
    kept = []
    for fields in ({}, {"query_stride": 2}, {"queries": "buffer"}, {"query_reduce": "group_mean"}):
        policy = {**KARA, "window": 32, "ratio": 0.4, **RECOMPUTED, **fields}
        found = inspect(make(llama_dir, policy=policy), prompt, continuation)
        kept.append(found.held.tobytes())
    assert len(set(kept)) == len(kept)


def test_an_unprotected_prompt_is_compressed_at_its_end(llama_dir: Path) -> None:
    """Four windows at once; the log serves them as well as chunks of any size."""
    policy = {**KARA, **LOGGED, "ratio": 0.25, "protect_prompt": False}
    (prompt,) = random_prompts([75], seed=4)
    held = []
    for settings in ({}, {"max_num_batched_tokens": 9, "max_num_seqs": 1}, {"block_size": 4}):
        found = inspect(make(llama_dir, policy=policy, **settings), prompt)
        assert [event.seen for event in found.events] == [75]
        assert found.held.shape[2] == 75 - 4 * (16 - 4)
        assert (found.held[..., -11:] == np.arange(64, 75)).all()
        held.append(found.held)
    assert all(np.array_equal(one, held[0]) for one in held)
