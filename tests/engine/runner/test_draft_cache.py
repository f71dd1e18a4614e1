"""A draft model's own cache: bounded, behind sliding windows, and on the first of several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvserve import SamplingParams
from kvserve.log import ConfigError
from kvserve.scheduler.blocks.draft_group import DraftGroup
from kvserve.scheduler.messages.drafts import DraftChunks
from tests.checkpoints import write_checkpoint
from tests.engine.runner.test_cuda_graph import KARA, make_plain
from tests.engine.runner.test_draft_model import (
    PROMPTS,
    assert_nothing_is_left,
    counts,
    drafting,
    kept,
)
from tests.engine.runner.test_draft_model import blurred_dir as blurred_dir
from tests.engine.runner.test_speculation import run, same
from tests.engine.test_pressure import watch

BOUNDED = {"name": "streaming_llm", "budget": 40, "sinks": 4}


def test_a_bounded_cache_keeps_sinks_and_the_newest(llama_dir: Path) -> None:
    """A model that guesses for itself is right as long as it holds all. With less it guesses what
    it would say if it saw no more, and the answers stay what they are."""
    params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * len(PROMPTS)
    plain = run(make_plain(llama_dir, "none"), params)
    rates = []
    for budget in (200, 40):
        llm = drafting(llama_dir, llama_dir, "none", kv_policy={**BOUNDED, "budget": budget})
        watch(llm)
        for one, other in zip(run(llm, params), plain, strict=True):
            same(one, other)
        guessed, right = counts(llm)
        rates.append(right / guessed)
        assert_nothing_is_left(llm)
    assert rates[0] == 1.0 > rates[1]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_bounded_draft_sees_what_it_holds(llama_dir: Path, backend: str) -> None:
    """Beside transformers, whose mask hides from each token what was dropped when it was read."""
    llm = drafting(
        llama_dir, llama_dir, "none", tokens=1, kv_policy=BOUNDED, attention_backend=backend
    )
    group = llm.engine.core.scheduler.blocks.find(DraftGroup)
    draft = llm.engine.core.runner.draft
    assert group is not None and group.bound is not None and draft is not None
    front = group.bound.front * group.block_tokens
    reference = AutoModelForCausalLM.from_pretrained(llama_dir, attn_implementation="eager")
    known, seen = np.zeros(200, np.int64), np.full((200, 200), -1e9, np.float32)
    guess, longest, checked = draft.guess, 0, 0

    def guess_and_compare(chunks: DraftChunks) -> Any:
        nonlocal longest, checked
        (start,), (length,), (dropped,) = chunks.starts, chunks.lengths, chunks.dropped
        end = start + length
        known[start:end] = chunks.token_ids
        for place in range(start, end):
            seen[place, front + dropped : place + 1] = 0.0
            seen[place, : min(front, place + 1)] = 0.0
        found = guess(chunks)
        longest = max(longest, int(group.held(1)[0]) * group.block_tokens)
        if found is not None:
            with torch.no_grad():
                logits = reference(
                    torch.from_numpy(known[None, :end]),
                    attention_mask=torch.from_numpy(seen[None, None, :end, :end]),
                ).logits
            assert int(found[0]) == int(logits[0, -1].argmax())
            checked += dropped > 0
        return found

    draft.guess = guess_and_compare  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    llm.generate([PROMPTS[0]], params)
    assert checked > 20 and longest <= 40 + group.block_tokens


@pytest.mark.parametrize(
    "policy, words",
    [
        ("kara", "kara scores entries, and nothing is observed of a draft model"),
        ({"name": "streaming_llm"}, "budget"),
        ({"name": "streaming_llm", "budget": 5}, "budget: 5 is below"),
        ({"name": "streaming_llm", "budgit": 8}, "did you mean budget"),
        ({**BOUNDED, "period": 4}, "period: a draft model's cache knows name, budget, sinks"),
        ({**BOUNDED, "remainder": "fitted"}, "remainder: a draft model's cache knows"),
        (3, "must be a policy's name or an object"),
    ],
)
def test_policies_that_a_draft_model_cannot_have(llama_dir: Path, policy: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--speculative-config: kv_policy: .*{words}"):
        drafting(llama_dir, llama_dir, "none", kv_policy=policy)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("eager", [False, True], ids=["recorded", "eager"])
def test_layers_with_windows(kind: str, eager: bool, tmp_path: Path) -> None:
    """A model that guesses for itself is always right, behind its windows too; if its cache is
    bounded, mostly: sinks are no part of a window."""
    directory = write_checkpoint(kind, tmp_path / kind)
    params = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 4
    plain = run(make_plain(directory, "none"), params)
    for policy, least in ((None, 1.0), ({**BOUNDED, "budget": 64}, 0.5)):
        llm = drafting(directory, directory, "none", kv_policy=policy, enforce_eager=eager)
        for one, other in zip(run(llm, params), plain, strict=True):
            same(one, other)
        guessed, right = counts(llm)
        assert right >= least * guessed > 20
        assert_nothing_is_left(llm)


@pytest.mark.parametrize("policy", ["none", KARA], ids=str)
def test_the_first_of_two_ranks_guesses_for_both(
    llama_dir: Path, blurred_dir: Path, policy: Any
) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=40 + i, ignore_eos=True) for i in range(4)]
    plain = run(make_plain(llama_dir, policy, tensor_parallel_size=2), params)
    llm = drafting(llama_dir, blurred_dir, policy, tensor_parallel_size=2)
    found = run(llm, params)
    for one, other in zip(found, plain, strict=True):
        same(one, other)
    assert kept(found) == kept(plain)
    guessed, right = counts(llm)
    assert guessed > right > 20
    assert_nothing_is_left(llm)
