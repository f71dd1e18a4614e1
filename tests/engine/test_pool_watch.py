"""What a watched pool shows: every block once, as the counts say; nothing while nobody looks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvserve.engine.core import pool_watch
from kvserve.engine.core.pool_watch import PoolWatch
from kvserve.stats import PoolView
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of

KARA = {"name": "kara", "window": 20, "buffer": 4, "chunk_budget": 3, "max_chunk": 4}


def owners(view: PoolView) -> Counter[int]:
    counts: Counter[int] = Counter()
    for owner, count in zip(view.cells[::2], view.cells[1::2], strict=True):
        counts[owner] += count
    return counts


@pytest.mark.parametrize(
    "policy",
    [
        KARA,
        {"name": "adakv", "budget": 20, "window": 4},
        pytest.param(
            {"name": "spindlekv", "window": 4, "flush_every": 8, "raw_fallback": False},
            marks=pytest.mark.compiler,
        ),
    ],
    ids=lambda policy: policy["name"],
)
def test_every_block_is_shown_once(llama_dir: Path, policy: Any) -> None:
    llm = make(llama_dir, policy=policy, block_size=4, num_gpu_blocks_override=2000)
    core, seen = llm.engine.core, Counter[int]()
    watch = PoolWatch(core)
    step, views = core.step, list[PoolView]()

    def watched() -> Any:
        outputs = step()
        views.append(watch.view())
        return outputs

    core.step = watched  # type: ignore[method-assign]
    tokens_of(llm, random_prompts([37, 30, 44, 21], seed=5), 60)
    for view in views:
        counts, stats = owners(view), view.stats
        assert sum(counts.values()) == stats.blocks_total
        assert (counts[0], counts[1]) == (stats.blocks_free, stats.blocks_cached)
        in_use = stats.blocks_total - stats.blocks_free - stats.blocks_cached
        assert sum(counts.values()) - counts[0] - counts[1] == in_use
        for index, request in enumerate(stats.requests):
            held = counts[4 + index] + view.log_blocks[index]
            assert held <= request.blocks or counts[3]
        seen += counts
    kinds = {"kara": {2, 4, 7}, "adakv": {4, 7}, "spindlekv": {3, 4}}[policy["name"]]
    assert kinds <= set(seen)


def test_a_large_pool_is_shown_in_fewer_cells(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_watch, "MOST_CELLS", 10)
    core = make(llama_dir, num_gpu_blocks_override=60).engine.core
    view = PoolWatch(core).view()
    assert view.blocks_per_cell == 6 and view.cells == [0, 10]


def test_views_come_only_while_watched_and_something_changes(llama_dir: Path) -> None:
    watch = PoolWatch(make(llama_dir).engine.core)
    assert not watch.due
    watch.switch(True)
    assert watch.due
    watch.view()
    watch._next = 0.0
    assert not watch.due, "the engine rests as it did"
    watch.switch(True)
    assert watch.due, "a new reader wants to see it"
    watch.switch(False)
    assert not watch.due
