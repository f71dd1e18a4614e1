"""``kv_trace``: what events drop is what `inspect` finds and what the counts say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM, SamplingParams
from kvserve.engine.frontend.inspect import inspect
from kvserve.log import RequestError
from kvserve.outputs import KVTraceEvent, RequestOutput
from kvserve.scheduler.arrays import IntArray
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make
from tests.engine.policies.cases import UNEVEN_BLOCK, UNEVEN_CASES
from tests.thinning import thinned

KARA = {"name": "kara", "window": 20, "buffer": 4, "chunk_budget": 3, "max_chunk": 4, "period": 5}
POLICIES: dict[str, Any] = {
    **UNEVEN_CASES,
    "spindlekv-codes": {"name": "spindlekv", "ratio": 0.3, "window": 4, "raw_fallback": False},
    "kara": KARA,
    "snapkv": {"name": "snapkv", "budget": 18, "window": 5},
    "streaming_llm": {"name": "streaming_llm", "budget": 18},
}
PROMPTS = random_prompts([37, 30, 44, 33], seed=5)


def traced(llm: LLM, prompts: list[list[int]], tokens: int, **more: Any) -> list[RequestOutput]:
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, kv_trace=True, **more
    )
    return llm.generate(prompts, params, use_tqdm=False)


def held(events: list[KVTraceEvent], tokens: int) -> IntArray:
    """Which of the first ``tokens`` positions are held: bool [L, Hkv, tokens]."""
    first = events[0]
    assert first.reason == "start"
    mask = np.ones((len(first.dropped), len(first.dropped[0]), tokens), bool)
    for event in events:
        if event.reason == "start":
            mask[:] = True
        for layer, heads in enumerate(event.dropped):
            for head, runs in enumerate(heads):
                for start, end in zip(runs[::2], runs[1::2], strict=True):
                    assert start < end <= event.seen
                    assert mask[layer, head, start:end].all(), "dropped twice"
                    mask[layer, head, start:end] = False
    return mask


def check_counts(output: RequestOutput) -> list[KVTraceEvent]:
    details, (choice,) = output.kv_cache_details, output.outputs
    assert choice.kv_trace is not None
    mask = held(choice.kv_trace, details.logical_tokens)
    assert mask.sum() == details.held_entries
    return choice.kv_trace


CODED = "spindlekv-codes"


@thinned(
    {
        "name": [
            *(each for each in POLICIES if each != CODED),
            pytest.param(CODED, marks=pytest.mark.compiler),
        ],
        "overlapped": [False, True],
    }
)
def test_what_is_left_is_what_is_counted(llama_dir: Path, name: str, overlapped: bool) -> None:
    policy = POLICIES[name]
    llm = make(llama_dir, policy=policy, async_scheduling=overlapped, block_size=UNEVEN_BLOCK)
    for output in traced(llm, PROMPTS, 60):
        events = check_counts(output)
        assert len(events) > 1
        assert sum(event.blocks_released for event in events) >= 0
        assert all(event.queries or policy["name"] != "kara" for event in events[1:])
    assert llm.engine.core.runner.compressor.on_moves is None, "followed for nobody"


def test_the_positions_are_those_that_inspect_finds(llama_dir: Path) -> None:
    (output,) = traced(make(llama_dir, policy=KARA), PROMPTS[:1], 72)
    events = check_counts(output)
    found = inspect(make(llama_dir, policy=KARA), PROMPTS[0], output.outputs[0].token_ids[:70])
    assert [event.seen for event in events[1:]] == [event.seen for event in found.events]
    for count, event in enumerate(found.events, start=2):
        mask = held(events[:count], event.seen)
        tokens = np.arange(event.seen)
        assert np.array_equal(mask, (event.held[..., None] == tokens).any(axis=2))


@pytest.mark.parametrize("swap_space", [0.0, 0.01])
def test_a_sequence_that_makes_way_is_followed_on(llama_dir: Path, swap_space: float) -> None:
    how = {"num_gpu_blocks_override": 14, "max_num_seqs": 8, "swap_space": swap_space}
    llm = make(llama_dir, policy=KARA, **how)
    outputs = traced(llm, PROMPTS, 90)
    starts = [sum(e.reason == "start" for e in check_counts(output)) for output in outputs]
    assert llm.engine.core.scheduler.totals.preemptions_total > 0
    assert max(starts) > 1 or swap_space


def test_several_ranks_are_refused(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make(llama_dir, policy=KARA).engine.core
    monkeypatch.setattr(core.runner.group, "size", 2)
    with pytest.raises(RequestError, match="tensor-parallel-size 1") as refused:
        core._tracer().check(10)
    assert (refused.value.param, refused.value.code) == ("kv_trace", "kv_trace_not_allowed")
