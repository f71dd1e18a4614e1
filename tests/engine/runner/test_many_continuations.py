"""Thousands of continuations that leave the pool for host memory, and then that too."""

from __future__ import annotations

import pytest

from kvserve import LLM, SamplingParams
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.blocks.continuations import Continuations


def test_making_room_looks_at_no_other_continuation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block that was freed looked at all of them: a step took 4 s at 2,500."""
    llm = LLM(
        "kvserve/tiny",
        num_gpu_blocks_override=200,
        max_num_batched_tokens=1024,
        continuations="on",
        swap_space=0.0002,
        policy={"name": "kara", "window": 64, "buffer": 8},
    )
    looks: list[int] = []
    held = Continuations.held

    def look(store: Continuations, *, hosted: bool = False) -> IntArray:
        looks.append(store.num_hosted)
        return held(store, hosted=hosted)

    monkeypatch.setattr(Continuations, "held", look)
    prompts = [[*[7] * 20, 3 + i % 60, 3 + i // 60] for i in range(300)]
    llm.generate(prompts, SamplingParams(max_tokens=1), use_tqdm=False)
    llm.generate([[5] * 2500], SamplingParams(max_tokens=4), use_tqdm=False)
    stats = llm.stats()
    known = stats.continuations + stats.hosted_continuations
    assert stats.hosted_continuations > 0 and known < 300, "some are gone: host memory is full"
    assert looks == []
