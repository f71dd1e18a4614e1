"""A cache group with one file and one registration goes wherever rows go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.runner.model_runner import LaunchedStep
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.engine.cache import checksum_group
from tests.engine.test_pressure import KARA as FAST
from tests.engine.test_pressure import make_llm
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import thinned

KARA = {**FAST, "period": 1}  # no early events: they depend on the pool
SHARED = [5, 9, 2, 7, 3, 8, 6, 4, 9, 5, 3, 7]


@pytest.fixture(autouse=True)
def _has_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_group, "wanted", True)


class Watched:
    """Looks at the numbers of all rows after every step."""

    def __init__(self, llm: LLM) -> None:
        self.checked = 0
        self._first: dict[tuple[int, int], float] = {}
        """Layer 0's number by token and position."""
        core = llm.engine.core
        self._scheduler, self._runner = core.scheduler, core.runner
        self._launch = core.runner.launch
        core.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        step = self._launch(output)
        rows = self._scheduler.rows
        for row in range(rows.num_rows):
            known = rows.num_tokens[row] - rows.num_unknown[row]
            count = int(min(rows.num_computed[row], known))
            (group,) = self._runner.batch.groups
            assert isinstance(group, checksum_group.ChecksumRows)
            found = group.of_row(row, count)
            if not rows.compactions[row]:
                torch.testing.assert_close(found, self._sums_of_keys(row, count))
            for at, number in enumerate(found[:, 0].tolist()):
                token = int(rows.token_ids[row, at])
                known = self._first.setdefault((token, at), number)
                assert number == pytest.approx(known, abs=1e-4)
            self.checked += count
        return step

    def _sums_of_keys(self, row: int, count: int) -> torch.Tensor:
        """What the cache of keys says, of a row that no event has changed: [count, layers]."""
        cache, batch = self._runner.cache, self._runner.batch
        layout, at = cache.layout, torch.arange(count)
        sums = []
        for layer in range(0, layout.num_layers, 2):
            keys, _, group = cache.keys_values(layer)
            assert isinstance(keys, torch.Tensor)
            blocks = batch.block_tables[group, row][:, at // layout.block_size].long()
            sums.append(keys[blocks, at % layout.block_size].float().sum((0, 2, 3)))
        return torch.stack(sums, 1)


def run_twice(llm: LLM) -> list[Any]:
    """Requests that share a prompt, then the next turn of each."""
    prompts = [[*SHARED, *range(10 + i, 30 + 3 * i)] for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    first = llm.generate(prompts, params, use_tqdm=False)
    again = [
        [*prompt, *output.outputs[0].token_ids, 7, 8, 9]
        for prompt, output in zip(prompts, first, strict=True)
    ]
    return [*first, *llm.generate(again, params, use_tqdm=False)]


@thinned({"layout": ["model", "layer", "head"], "policy": [KARA, "none"]})
def test_rows_keep_what_they_hold(llama_dir: Path, policy: Any, layout: str) -> None:
    """Prefix hits, chunks, events, swaps, recomputations and continuations, in a small pool."""
    lanes = {"model": 1, "layer": 2, "head": 4}[layout]
    settings = {"kv_layout": layout, "block_size": 4, "max_num_batched_tokens": 48}
    llm = make_llm(
        llama_dir,
        policy,
        **settings,
        num_gpu_blocks_override=90 * lanes,
        swap_space=1 / 1024,
        continuations="on",
    )
    watched = Watched(llm)
    preempt_now_and_then(llm.engine.core.scheduler, np.random.default_rng(0), 0.03)
    found = run_twice(llm)
    stats = llm.stats()
    assert watched.checked > 5_000 and stats.preemptions_total
    assert bool(stats.swaps_total and stats.resumed_total) == (policy != "none")
    assert any(output.num_cached_tokens for output in found)
    plain = make_llm(llama_dir, policy, **settings, continuations="on")
    # Later turns depend on what was dropped meanwhile.
    first, same = (
        [each.outputs[0].token_ids for each in of[:6]] for of in (found, run_twice(plain))
    )
    assert first == same


@pytest.mark.slow
def test_ranks_hold_it_too(llama_dir: Path) -> None:
    """Each rank sums the keys of its own heads; the other rank finds the group by its name."""
    llm = make_llm(llama_dir, KARA, tensor_parallel_size=2)
    watched = Watched(llm)
    run_twice(llm)
    assert watched.checked > 5_000
