"""Random checkpoints of any architecture of transformers, and greedy tokens of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvserve import LLM, SamplingParams
from tests.checkpoints import random_prompts

PROMPTS = random_prompts([5, 60, 1, 33])
TOKENS = 32


def write(kind: Any, config: Any, directory: Path) -> Path:
    """A checkpoint of ``kind``, one of transformers' ``AutoModelFor...``; norms keep activations in
    range, so that greedy tokens are stable."""
    torch.manual_seed(0)
    model = kind.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2)
        else:
            parameter.data += torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def expected(kind: Any, directory: Path) -> list[list[int]]:
    """What transformers goes on with, by passes over whole texts."""
    model = kind.from_pretrained(directory, attn_implementation="eager")
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        for _ in range(TOKENS):
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            ids = torch.cat([ids, logits.argmax().view(1, 1)], dim=1)
        found.append(ids[0, len(prompt) :].tolist())
    return found


def make(directory: Path, **settings: Any) -> LLM:
    how: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, **settings}
    return LLM(str(directory), num_gpu_blocks_override=200, **how)


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
