"""Prompts that begin alike share blocks, and nobody's output changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvserve import LLM, SamplingParams
from tests.checkpoints import random_prompts
from tests.thinning import thinned

PREFIX, *TAILS = random_prompts([70, 5, 23, 1, 40])
PROMPTS = [PREFIX + tail for tail in TAILS]
KARA = {"name": "kara", "window": 20, "buffer": 4, "chunk_budget": 2, "period": 3}
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def run(
    directory: Path, policy: Any, caching: bool, **settings: Any
) -> tuple[LLM, list[list[int]], list[int]]:
    llm = LLM(
        str(directory),
        policy=policy,
        dtype="float32",
        skip_tokenizer_init=True,
        enable_prefix_caching=caching,
        **settings,
    )
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.engine.core.scheduler.check_integrity()
    tokens = [out.outputs[0].token_ids for out in (*outputs, *again)]
    return llm, tokens, [out.num_cached_tokens for out in again]


@thinned(
    {
        "settings": [
            {},
            {"max_num_batched_tokens": 16, "max_num_seqs": 4},
            {"num_gpu_blocks_override": 26},
        ],
        "policy": [KARA, "none"],
    }
)
def test_hits_change_no_token(llama_dir: Path, policy: Any, settings: dict[str, Any]) -> None:
    _, expected, none_cached = run(llama_dir, policy, caching=False)
    llm, tokens, cached = run(llama_dir, policy, caching=True, **settings)
    assert tokens == expected
    assert none_cached == [0, 0, 0, 0]
    assert all(count % 16 == 0 for count in cached)
    if not settings:
        # Everything but the last token of each prompt, in whole blocks.
        assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]
    assert sum(cached) > 0
    if policy != "none":
        assert llm.stats().compactions_total > 0


def test_a_follow_up_turn_finds_the_answer_it_continues(llama_dir: Path) -> None:
    llm = LLM(str(llama_dir), dtype="float32", skip_tokenizer_init=True)
    (first,) = llm.generate([PREFIX], GREEDY, use_tqdm=False)
    talk = PREFIX + first.outputs[0].token_ids + TAILS[0]
    (second,) = llm.generate([talk], GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == (70 + 59) // 16 * 16
    # Under Kara the answer's blocks no longer name its tokens: only the prompt is found.
    llm = LLM(str(llama_dir), policy=KARA, dtype="float32", skip_tokenizer_init=True)
    (first,) = llm.generate([PREFIX], GREEDY, use_tqdm=False)
    talk = PREFIX + first.outputs[0].token_ids + TAILS[0]
    (second,) = llm.generate([talk], GREEDY, use_tqdm=False)
    assert second.num_cached_tokens == 70 // 16 * 16
