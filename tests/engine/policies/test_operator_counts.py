"""What an event costs in launches: neither sequences nor layers nor heads add any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvserve.engine.cache.kept_scores import KeptScores
from kvserve.engine.cache.kv_cache import KVCache
from kvserve.engine.cache.log_form import LogForm
from kvserve.engine.compression.compressor import Compressor
from kvserve.engine.compression.observer import Observer
from kvserve.engine.policies.base import Policy
from kvserve.engine.policies.selection import token_to_chunk_torch
from kvserve.engine.runner import warm_up
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.score.centre_scores import Centres
from kvserve.kernels.score.token_to_chunk_triton import token_to_chunk_triton
from kvserve.late import Made
from kvserve.scheduler.arrays import IntArray
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events
from tests.engine.policies.cases import CASES, PROMPT, Case

BLOCK, COLUMNS = 8, 16
LOGGING = [case for case in CASES if case.events and case.make().event_trigger.logs]


class CountCalls(TorchDispatchMode):
    """Counts operators, whatever they work on."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def first_event(policy: Policy, events: int) -> Events:
    """``events`` equal rows, at their first event; row e holds blocks e * COLUMNS + 1 and on."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=4, block_size=BLOCK)
    task = warm_up.first_event(policy, layout, events, PROMPT, 4096)
    assert task is not None
    first, width = int(task.copy_start[0]) // BLOCK, task.dst_blocks.shape[-1]
    return replace(task, dst_blocks=tables(events)[:, :, :, first : first + width])


def tables(events: int) -> IntArray:
    return np.arange(1, events * COLUMNS + 1).reshape(1, events, 1, COLUMNS)


def count_calls(policy: Policy, events: int, layers: int, kv_heads: int, group: int) -> int:
    layout = KVLayout(layers, kv_heads, head_dim=4, block_size=BLOCK)
    cache = KVCache(layout, events * COLUMNS + 1, LogForm(kv_heads * group), torch.float32, "cpu")
    cache.kv.normal_(generator=torch.Generator().manual_seed(0))
    task = first_event(policy, events)
    kv_tables = torch.tensor(tables(events), dtype=torch.int32)
    log_tables = torch.ones(1, events, 1, 256, dtype=torch.int32)
    unused: Any = None  # these cases log their queries
    heads = torch.rand(layers, kv_heads * group, 4)
    centres = Centres(heads, heads[..., :2], torch.rand(layers, 2))
    observer = Observer(cache, 0.5, recomputer=unused, centres=Made(lambda: centres))
    compressor = Compressor(cache, observer, KeptScores(layout, events, "cpu"))
    with CountCalls() as counter:
        compressor.run(task, policy, kv_tables, log_tables)
    return counter.calls


@pytest.mark.parametrize("case", LOGGING, ids=lambda c: c.label)
def test_an_event_takes_the_same_calls_for_any_batch(case: Case) -> None:
    policy = case.make()
    # From 2 on: where an axis has one place, a view may do for a copy.
    small = count_calls(policy, events=2, layers=4, kv_heads=2, group=2)
    assert small > 20
    for shape in ((9, 4, 2, 2), (2, 12, 2, 2), (2, 4, 8, 2), (2, 4, 2, 8), (5, 8, 4, 4)):
        assert count_calls(policy, *shape) == small, shape


def test_selection_by_torch_and_by_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Kara's choice of an event's entries takes, kernel aside, where CUDA takes the kernel."""
    launches = []
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *args, **options: launches.append(kernel))
    scores = torch.rand(2, 4, 2, 480)
    with CountCalls() as by_torch:
        token_to_chunk_torch(scores, 144, 16, 8)
    with CountCalls() as by_kernel:
        token_to_chunk_triton(scores, 144, 16, 8)
    assert by_torch.calls >= 40
    assert by_kernel.calls == 1 and len(launches) == 1  # memory for the answer
