"""Greedy output equals transformers token for token, whatever happens in the scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvserve import LLM
from kvserve.engine.policies.kara import Kara
from tests.checkpoints import greedy, random_prompts, write_checkpoint
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.thinning import slow

TOKENS = 140
PROMPTS = random_prompts([5, 17, 33, 1, 90, 64])
CHUNKS = {"max_num_batched_tokens": 16, "max_num_seqs": 4}  # of all sizes, waiting sequences
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_gpu_blocks_override": 24},  # preempted
    {"enable_chunked_prefill": False, "block_size": 6},
    {"max_num_batched_tokens": 8, "max_num_seqs": 8, "num_gpu_blocks_override": 20},
    *(
        {"attention_backend": backend, "kv_layout": layout, **CHUNKS}
        for backend in ("auto", "torch")
        for layout in ("model", "layer", "head")
    ),
]


def generate(directory: Path, policy: Any = "none", **settings: Any) -> tuple[LLM, list[list[int]]]:
    llm = make(directory, policy=policy, kv_cache_memory=2**22, **settings)
    found = tokens_of(llm, PROMPTS, TOKENS)
    llm.engine.core.scheduler.check_integrity()
    assert llm.stats().kv_cache_usage == 0.0
    return llm, found


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        *slow("qwen3", "llama-mha-tied", "mistral", "internlm2", "qwen2"),
    ],
)
def test_greedy_equals_transformers(kind: str, tmp_path: Path) -> None:
    directory = write_checkpoint(kind, tmp_path)
    expected = greedy(directory, PROMPTS, TOKENS)
    for settings in SETTINGS:
        llm, tokens = generate(directory, **settings)
        assert tokens == expected, settings
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().preemptions_total > 0, "the pool was meant to be too small"


@pytest.mark.compiler
def test_auto_is_the_compiled_backend(llama_dir: Path) -> None:
    summary = make(llama_dir).engine.core.described().summary
    assert ("attention", "cpu") in [row[:2] for row in summary]


KEEP_ALL = {"name": "kara", "window": 24, "buffer": 5, "ratio": 1, "chunk_budget": 0, "period": 3}


def test_slot_order_does_not_matter(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that keep everything but shuffle it, apart in every layer and head, are ``none``."""

    events = []

    def shuffled(self: Kara, scores: Tensor, length: int, keep: int) -> Tensor:
        assert keep == length
        events.append(len(scores))
        return torch.rand(*scores.shape[:-1], length).argsort(dim=-1)

    monkeypatch.setattr(Kara, "select", shuffled)
    # Torch reads all entries before it writes any; kernels expect them in order.
    torch_s = generate(llama_dir, KEEP_ALL, attention_backend="torch")[1]
    assert torch_s == generate(llama_dir, attention_backend="torch")[1]
    assert sum(events) > len(PROMPTS)
