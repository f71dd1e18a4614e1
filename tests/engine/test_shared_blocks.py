"""Requests that begin alike on a full pool: each answer is that of the same request alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM, SamplingParams
from kvserve.log import RequestError
from kvserve.outputs import RequestOutput
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make

POLICIES: dict[str, dict[str, Any]] = {
    "none": {"name": "none"},
    "snapkv": {"name": "snapkv", "budget": 40, "window": 8},
    "snapkv again": {
        **{"name": "snapkv", "trigger": "threshold", "budget": 32, "threshold": 48, "window": 8},
        "protect_prompt": False,
    },
    "keydiff": {"name": "keydiff", "budget": 40},
    "streaming_llm": {"name": "streaming_llm", "budget": 40, "period": 8},
    "kara": {"name": "kara", "window": 48, "buffer": 8, "period": 8, "protect_prompt": False},
    "kara, prompts kept": {"name": "kara", "window": 32, "buffer": 8, "period": 8},
    "rkv": {"name": "rkv", "budget": 40, "window": 8},
    "chunkkv": {"name": "chunkkv", "budget": 40, "window": 8},
    "h2o": {"name": "h2o", "budget": 40},
    "pyramidkv": {"name": "pyramidkv", "budget": 40, "window": 8},
    "adakv": {"name": "adakv", "budget": 40, "window": 8},
    "dynamickv": {"name": "dynamickv", "budget": 40, "window": 8},
    "spindlekv": {"name": "spindlekv", "window": 16},
}


def answers(llm: LLM, prompts: list[list[int]], limits: list[int]) -> list[RequestOutput]:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in limits]
    return llm.generate(prompts, params, use_tqdm=False)


def compare(name: str, seed: int) -> tuple[int, int]:
    """Requests whose answers were compared, and how many of these differ."""
    rng = np.random.default_rng(seed)
    settings: dict[str, Any] = {"policy": POLICIES[name], "dtype": "float32", "max_num_seqs": 8}
    settings |= {"skip_tokenizer_init": True, "async_scheduling": bool(seed % 2)}
    common = rng.integers(3, 440, int(rng.integers(16, 65))).tolist()
    asked = [
        (common + rng.integers(3, 440, int(n)).tolist(), int(rng.integers(4, 25)))
        for n in rng.integers(1, 40, int(rng.integers(4, 11)))
    ]
    size = int(rng.integers(12, 60))
    large = LLM("kvserve/tiny", num_gpu_blocks_override=20_000, **settings)
    size *= large.engine.core.scheduler.layout.groups
    small = LLM("kvserve/tiny", num_gpu_blocks_override=size, **settings)
    compared = different = 0
    fits = [one for one in asked if _fits(small, *one)]
    together = answers(small, [prompt for prompt, _ in fits], [limit for _, limit in fits])
    for (prompt, limit), crowded in zip(fits, together, strict=True):
        if any(event.reason == "pressure" for event in crowded.compactions):
            continue  # where a pool runs short, events come early, and keep something else
        (alone,) = answers(large, [prompt], [limit])
        found = crowded.outputs[0].token_ids  # fewer, if the pool could hold no more of it
        compared += 1
        different += alone.outputs[0].token_ids[: len(found)] != found
    small.close()
    large.close()
    return compared, different


def _fits(llm: LLM, prompt: list[int], limit: int) -> bool:
    try:
        llm.engine.add_request("fits", prompt, SamplingParams(max_tokens=limit, ignore_eos=True))
    except RequestError:
        return False
    llm.engine.abort_request("fits")
    return True


@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        *((name, 3) for name in ("snapkv", "keydiff", "kara", "adakv")),
        *(pytest.param(name, 60, marks=pytest.mark.slow) for name in POLICIES),
    ],
)
def test_answers_are_those_of_requests_alone(name: str, seeds: int) -> None:
    found = [compare(name, seed) for seed in range(seeds)]
    assert sum(compared for compared, _ in found) > 2 * seeds
    assert not [seed for seed, (_, different) in enumerate(found) if different]


@pytest.mark.parametrize(
    ("policy", "found"), [("none", 70 + 59), (POLICIES["kara, prompts kept"], 70)]
)
def test_a_follow_up_turn_finds_the_answer_it_continues(
    llama_dir: Path, policy: Any, found: int
) -> None:
    """Under Kara the answer's blocks no longer name its tokens: only the prompt is found."""
    prompt, more = random_prompts([70, 5])
    llm = make(llama_dir, policy=policy)
    (first,) = answers(llm, [prompt], [60])
    talk = prompt + first.outputs[0].token_ids + more
    (second,) = answers(llm, [talk], [60])
    assert second.num_cached_tokens == found // 16 * 16
