"""Rows whose newest entries are held as they were computed, where lengths differ by layer or head.

Policies that keep equal lengths: policies/test_conformance.py, which has the reference too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.guesses import SPECULATIVE
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.engine.policies.cases import UNEVEN_CASES
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import slow


@pytest.mark.usefixtures("few_newest", "some_text")
@pytest.mark.parametrize(
    "case",
    [
        *(("pyramidkv", "layer"), ("adakv", "head")),
        *slow(("none", "head"), ("spindlekv", "head"), ("windowkv", "layer")),
    ],
    ids="-".join,
)
def test_alone_and_in_a_crowd(tmp_path: Path, case: tuple[str, str]) -> None:
    """Beside others, in chunks, with guesses, hits, swaps and recomputation: the same tokens."""
    policy, layout = case
    directory = write_checkpoint("qwen3", tmp_path)
    prompts = random_prompts([70, 23, 41, 5], seed=5)
    settings: dict[str, Any] = {"kv_layout": layout, "kv_cache_dtype": "3bit"}
    settings["policy"] = UNEVEN_CASES.get(policy, policy)
    alone = make(directory, max_num_seqs=1, enable_prefix_caching=False, **settings)
    expected = tokens_of(alone, prompts, 60)
    settings |= {"max_num_batched_tokens": 99, "speculative_config": SPECULATIVE, "swap_space": 1}
    crowd = make(directory, max_num_seqs=6, **settings)
    scheduler = crowd.engine.core.scheduler
    preempt_now_and_then(scheduler, np.random.default_rng(0), 0.1)
    assert tokens_of(crowd, prompts * 2, 60) == expected * 2
    scheduler.check_integrity()
    assert scheduler.totals.preemptions_total > 5
    assert bool(scheduler.totals.swaps_total) == (policy != "none")
