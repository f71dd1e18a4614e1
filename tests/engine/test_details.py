"""What ``kv_cache_details`` says of a request."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kvserve import LLM, SamplingParams
from kvserve.outputs import KVCacheDetails
from tests.checkpoints import random_prompts, write_checkpoint


def details_of(directory: Path, policy: Any, prompt: int) -> tuple[KVCacheDetails, LLM]:
    llm = LLM(str(directory), policy=policy, dtype="float32", skip_tokenizer_init=True)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (output,) = llm.generate(random_prompts([prompt], seed=1), params, use_tqdm=False)
    return output.kv_cache_details, llm


@pytest.mark.parametrize(
    ("policy", "prompt"),
    [
        ({"name": "pyramidinfer", "interval": 3, "min_context": 42}, 99),
        pytest.param({"name": "spindlekv", "window": 26}, 15, marks=pytest.mark.compiler),
    ],
    ids=["pyramidinfer", "spindlekv"],
)
def test_events_that_evict_and_code_nothing_are_no_compactions(
    policy: dict[str, Any], prompt: int, llama_dir: Path
) -> None:
    details, llm = details_of(llama_dir, policy, prompt)
    assert (details.evicted_tokens, details.coded_entries, details.blocks_released) == (0, 0, 0)
    stats = llm.stats()
    assert details.compactions == stats.compactions_total == len(stats.compaction_counts) == 0


def test_logged_queries_are_counted_apart(llama_dir: Path) -> None:
    """27 + 11 tokens held, in three blocks; all of their queries are logged, none dropped yet."""
    none, _ = details_of(llama_dir, "none", 27)
    roomy, llm = details_of(llama_dir, {"name": "h2o", "budget": 100}, 27)
    cache = llm.engine.core.runner.cache
    block = cache.kv[0].nbytes
    assert none.held_bytes == roomy.held_bytes == 3 * block
    assert none.log_bytes == 0 and roomy.log_bytes >= 3 * block


def test_bytes_of_layers_with_windows_are_told(tmp_path: Path) -> None:
    """98 + 11 tokens in blocks of 16, and windows of 20: all of them, or 40, in two layers, and the
    last three blocks in the two others."""
    directory = write_checkpoint("gpt-oss", tmp_path)
    told = []
    for policy in ("none", {"name": "streaming_llm", "budget": 40, "period": 1}):
        details, llm = details_of(directory, policy, 98)
        cache = llm.engine.core.runner.cache
        block = cache.kv[0].nbytes
        told.append((details.held_bytes // block, details.window_bytes // block))
    assert told == [(7 + 3, 3), (3 + 3, 3)]


def test_the_pages_show_what_their_example_gives() -> None:
    """The request of examples/chain.json under the policy of `make run`."""
    root = Path(__file__).parents[2]
    shown, first = (
        json.loads((root / page).read_text().split("```json\n")[1].split("```")[0])
        for page in ("docs/start.md", "README.md")
    )
    asked = json.loads((root / "examples/chain.json").read_text())
    llm = LLM(asked["model"], policy="kara")
    params = SamplingParams(temperature=asked["temperature"], max_tokens=asked["max_tokens"])
    (output,) = llm.chat(asked["messages"], params, use_tqdm=False)
    usage = shown["usage"]
    assert len(output.outputs[0].token_ids) == usage["completion_tokens"]
    assert output.kv_cache_details is not None
    assert asdict(output.kv_cache_details) == usage["kv_cache_details"]
    some = first["usage"]["kv_cache_details"]
    assert some and some.items() <= usage["kv_cache_details"].items()
