"""Log-probabilities of prompts and outputs are transformers', whatever the scheduler does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvserve import LLM, SamplingParams
from kvserve.outputs import RequestOutput
from tests.checkpoints import random_prompts

PROMPTS = random_prompts([40, 17, 33, 2, 90, 64])


@pytest.fixture(scope="module")
def model(llama_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama_dir, dtype=torch.float32).eval()


def check(model: Any, output: RequestOutput) -> None:
    prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    assert output.prompt_logprobs[0] is None
    found = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert len(found) == len(prompt) + len(tokens) - 1
    for at, (token, entry) in enumerate(zip((prompt + tokens)[1:], found, strict=True)):
        assert entry is not None
        row = expected[at]
        for known, item in entry.items():
            assert item.logprob == pytest.approx(float(row[known]), abs=2e-4)
            assert item.rank == int((row > row[known]).sum()) + 1
        assert entry.keys() == {token, *row.topk(2).indices.tolist()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 13},  # prompts are preempted and scored again
        {"policy": {"name": "snapkv", "budget": 8, "window": 4}},
    ],
)
def test_logprobs_equal_transformers(model: Any, llama_dir: Path, settings: dict[str, Any]) -> None:
    llm = LLM(str(llama_dir), dtype="float32", skip_tokenizer_init=True, **settings)
    tokens = 1 if "policy" in settings else 40
    params = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2, prompt_logprobs=2
    )
    for _ in range(2):  # the second time, the prefix cache must not hide the prompts
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            check(model, output)
    if "num_gpu_blocks_override" in settings:
        assert llm.stats().preemptions_total > 0
    assert llm.stats().kv_cache_usage == 0.0


def test_neighbours_that_ask_for_none_get_none(llama_dir: Path) -> None:
    llm = LLM(str(llama_dir), dtype="float32", skip_tokenizer_init=True)
    params = [SamplingParams(max_tokens=2, prompt_logprobs=n) for n in (None, 0)]
    quiet, asked = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert quiet.prompt_logprobs is None
    assert asked.prompt_logprobs is not None
    assert [len(entry) for entry in asked.prompt_logprobs[1:] if entry] == [1] * 16
