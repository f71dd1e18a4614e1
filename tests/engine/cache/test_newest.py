"""Rows whose newest entries are held as they were computed, where lengths differ by layer or head.

Policies that keep equal lengths: policies/test_conformance.py, which has the reference too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM, SamplingParams
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.guesses import SPECULATIVE
from tests.engine.policies.cases import UNEVEN_CASES
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow

PARAMS = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


@pytest.mark.usefixtures("few_newest")
@pytest.mark.parametrize(
    "case",
    [
        *(("pyramidinfer", "layer"), ("adakv", "head")),
        *slow(("none", "head"), ("spindlekv", "head"), ("windowkv", "layer")),
    ],
    ids="-".join,
)
def test_alone_and_in_a_crowd(tmp_path: Path, case: tuple[str, str]) -> None:
    """Beside others, in chunks, with guesses, hits, swaps and recomputation: the same tokens."""
    policy, layout = case
    directory = write_checkpoint("qwen3", tmp_path, head_dim=64)
    prompts = random_prompts([70, 23, 41, 5], seed=5)
    settings: dict[str, Any] = {"kv_layout": layout, "kv_cache_dtype": "k4v4", "dtype": "float32"}
    settings |= {"policy": UNEVEN_CASES.get(policy, policy), "skip_tokenizer_init": True}
    alone = LLM(str(directory), max_num_seqs=1, enable_prefix_caching=False, **settings)
    expected = alone.generate(prompts, PARAMS, use_tqdm=False)
    settings |= {"max_num_batched_tokens": 99, "speculative_config": SPECULATIVE, "swap_space": 1}
    crowd = LLM(str(directory), max_num_seqs=6, **settings)
    scheduler = crowd.engine.core.scheduler
    preempt_now_and_then(scheduler, np.random.default_rng(0), 0.1)
    found = crowd.generate(prompts * 2, PARAMS, use_tqdm=False)
    scheduler.check_integrity()
    assert scheduler.totals.preemptions_total > 5 and bool(scheduler.totals.swaps_total) == (
        policy != "none"
    )
    tokens = [[each.outputs[0].token_ids for each in of] for of in (found, expected)]
    assert tokens[0] == tokens[1] * 2
