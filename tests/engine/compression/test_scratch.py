"""What an event moves; and what events take beside the pool fits what was reserved for it, however
long a prompt is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.gpu_runs.jobs import CONFIGS
from kvserve import LLM
from kvserve.engine.compression.moves import MovePlan, lane_numbers
from kvserve.engine.compression.observer import SCRATCH_BYTES, event_bytes
from kvserve.engine.models import loader
from kvserve.engine.policies.registry import make_policy
from kvserve.engine.policies.scoring import Observation
from kvserve.engine.runner.warm_up import first_event
from kvserve.kernels.dispatch import Kernel
from kvserve.kernels.score.causal_scores import Queries, causal_scores, past_scores, received_mass
from kvserve.kernels.score.key_similarity import anchor_similarity
from kvserve.kernels.store.int4_log import quantize
from kvserve.scheduler.layout import Granularity, KVLayout
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.triggers.trigger import EventKind, EvictionSpec
from tests.checkpoints import random_prompts
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.meta_device import KARA, no_likenesses, on_a_device
from tests.peak_bytes import PeakBytes
from tests.thinning import slow

__all__ = ["no_likenesses", "on_a_device"]


def test_plan_follows_the_worked_example() -> None:
    """b=4, prompt 5, 14 entries, W=8, U=2, N=3: two heads keep different places."""
    kept = torch.tensor([[[[0, 2, 5], [1, 2, 3]]]])
    one, three, five, six, eight = (np.array([value]) for value in (1, 3, 5, 6, 8))
    events = EvictionSpec(five, one, six, three, five, eight, five)
    row, old = np.zeros(1, int), np.full((1, 1, 1), 14)
    new = old - events.evicted
    task = Events(0, EventKind.EVEN, row, row, events, old, None, new, five, five, five)
    assert task.new_lens.item() == 11
    layout = KVLayout(num_layers=1, num_kv_heads=2, head_dim=8, block_size=4)
    plan = MovePlan.of(kept + 5, lane_numbers(task, three, layout, task.copy_start))
    assert plan.counts.tolist() == [[[6, 6]]]
    assert plan.src[0, 0].tolist() == [[5, 7, 10, 11, 12, 13], [6, 7, 8, 11, 12, 13]]


@pytest.mark.usefixtures("on_a_device")
@pytest.mark.parametrize("prompt", [pytest.param(32_000, marks=pytest.mark.slow), 131_000])
@pytest.mark.parametrize(
    "policy",
    [
        {"name": "snapkv", "ratio": 0.5},
        {"name": "adakv", "budget": 2048},
        {"name": "streaming_llm", "budget": 2048, "remainder": "mean"},
        *slow(
            {"name": "snapkv", "budget": 2048},
            {"name": "pyramidkv", "budget": 2048},
            {"name": "dynamickv", "budget": 2048},
            {"name": "keydiff", "budget": 2048},
        ),
    ],
    ids=lambda policy: "-".join(map(str, policy.values())),
)
def test_a_long_prompt_fits_the_scratch(
    policy: dict[str, Any], prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "fill_randomly", lambda *_: None)
    llm = LLM(
        str(CONFIGS / "llama-3.1-8b"),
        policy=policy,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=64,
        max_num_seqs=2,
        num_gpu_blocks_override=4096,
    )
    runner = llm.engine.core.runner
    layout, tables = runner.cache.layout, (runner.batch.block_tables, runner.batch.log_tables)
    prepared = make_policy(policy).for_model(layout.num_layers, layout.block_size)
    task = first_event(prepared, layout, 1, prompt, longest=2**20)
    assert task is not None
    with torch.inference_mode(), PeakBytes() as peak:
        if prepared.granularity is Granularity.MODEL:
            runner.compressor.run(task, prepared, *tables)
        else:
            runner.compressor.observe(task, prepared, *tables)
    assert 2**24 < peak.most <= event_bytes(layout, prompt), f"{peak.most / 2**20:.0f} MiB"


@pytest.mark.parametrize("reduce", ["mean", "none"])
@pytest.mark.parametrize("form", ["numbers", "int4"])
def test_scores_in_pieces_are_the_same(
    reduce: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key = torch.randn(2, 3, 4, 5, 16), torch.randn(2, 3, 2, 40, 16)
    missing = torch.zeros(2, 3, 2, 40, dtype=torch.bool)
    missing[1, :, 1, :9] = True
    queries: Queries = query
    shares = None
    if form == "int4":
        queries = quantize(query, torch.full(query.shape[:-1], -0.5))
        shares = queries.shares

    def scores() -> list[torch.Tensor]:
        return [
            causal_scores(queries, key, 0.25, reduce, missing, shares),
            past_scores(queries, key, 0.25, "max", missing, shares),
            received_mass(queries, key, 0.25, torch.rand(5), missing, block=2),
            anchor_similarity(key, missing),
        ]

    torch.manual_seed(1)
    whole = scores()
    monkeypatch.setattr("kvserve.kernels.score.causal_scores.PIECE_BYTES", 1)
    monkeypatch.setattr("kvserve.kernels.score.key_similarity.PIECE_BYTES", 1)
    torch.manual_seed(1)
    torch.testing.assert_close(scores(), whole)


def test_what_is_reserved_grows_with_the_context() -> None:
    """2 % of an H100 for prompts of 128k tokens on an 8B model; nothing more for short ones."""
    layout = KVLayout(32, 8, 128, 64)
    assert event_bytes(layout, 2048) == SCRATCH_BYTES
    assert event_bytes(layout, 8192) < 1.25 * SCRATCH_BYTES
    assert event_bytes(layout, 131_072) < 0.025 * 80e9


def test_scratch_is_bounded(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are observed as many at a time as the scratch holds; one at a time is no other."""
    results = []
    for scratch in (2**28, 1):
        llm = make(llama_dir, policy=KARA)
        compressor, most = llm.engine.core.runner.compressor, 0
        monkeypatch.setattr(compressor.observer, "scratch_bytes", scratch)
        observed = compressor.observer.observe

        def watched(*args: Any) -> Iterator[tuple[slice, slice, Any, Observation]]:
            nonlocal most
            for some, layers, scores, observation in observed(*args):  # noqa: B023
                most = max(most, len(observation.keys))
                yield some, layers, scores, observation

        monkeypatch.setattr(compressor.observer, "observe", watched)
        results.append(tokens_of(llm, random_prompts([11, 7, 19], seed=4), 90))
        assert (most == 1) == (scratch == 1)
    assert results[0] == results[1]


class CountLaunches(TorchDispatchMode):
    """Notes operators that launch something on a device: views and memory launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, silent = func.overloadpacket.__name__, ("_unsafe_view", "detach", "alias")
        on_device = isinstance(result, torch.Tensor) and result.device.type == "meta"
        if on_device and not func.is_view and "empty" not in name and name not in silent:
            self.names.append(name)
        return result


@pytest.mark.usefixtures("on_a_device")
def test_the_events_of_a_step_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of Kara on an 8B model, whose queries in 4 bits and keys in 16 are counted as the bytes
    that they are: an H100 took eight pieces and 900 launches when they were counted as four bytes a
    number."""
    monkeypatch.setattr(loader, "fill_randomly", lambda *_: None)
    llm = LLM(
        str(CONFIGS / "llama-3.1-8b"),
        policy="kara",
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        block_size=64,
        max_num_seqs=4,
        num_gpu_blocks_override=4096,
    )
    runner, kernels = llm.engine.core.runner, list[str]()
    policy = make_policy({"name": "kara"})
    task = first_event(policy, runner.cache.layout, 4, 256, longest=2**20)
    assert task is not None and (task.plan.num_scored_queries == 512).all()
    tables = runner.batch.block_tables, runner.batch.log_tables
    note = lambda kernel, *_, **__: kernels.append(kernel.source.__name__)  # noqa: E731
    monkeypatch.setattr(Kernel, "launch", note)
    with torch.no_grad(), PeakBytes() as peak, CountLaunches() as operators:
        runner.compressor.run(task, policy, *tables)
    assert kernels.count("_shares") == 1, "pieces"
    assert len(kernels) + len(operators.names) <= 150, Counter(operators.names)
    assert peak.most <= SCRATCH_BYTES
