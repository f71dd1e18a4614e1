"""What an event does to the cache, and that decoding over it is attention under the kept set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kvserve import LLM, SamplingParams
from kvserve.engine.compression.moves import MovePlan, plan_moves
from kvserve.engine.frontend.inspect import KeptPositions
from kvserve.engine.frontend.llm_engine import LLMEngine
from kvserve.engine.policies.scoring import Observation
from kvserve.kernels.slot_mapping import slot_mapping
from kvserve.scheduler.layout import KVLayout
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.triggers.trigger import EventKind, EvictionSpec
from tests.checkpoints import random_prompts
from tests.engine.dense_reference import dense_pass, load_dense

POLICY = {
    "name": "kara",
    "window": 20,
    "buffer": 4,
    "ratio": 0.4,
    "chunk_budget": 3,
    "max_chunk": 4,
    "period": 5,
    "remainder": "off",
}
PAPER = {"name": "kara", "preset": "paper", "window": 24, "buffer": 4, "budget": 12, "period": 6}
TOKENS = 90


def run_one(
    directory: Path,
    policy: dict[str, Any],
    prompt: list[int],
    least: int = 3,
    block_size: int = 4,
) -> tuple[list[int], list[Tensor], KeptPositions]:
    """Generate greedily; returns tokens, each step's logits, and the kept sets of ``least`` or more
    events."""
    settings: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True}
    settings["block_size"] = block_size
    llm = LLM(str(directory), policy=policy, **settings)
    runner = llm.engine.core.runner
    kept = KeptPositions(runner.cache.layout.num_layers, runner.cache.layout.num_kv_heads)
    runner.compressor.on_moves = kept.on_moves
    logits: list[Tensor] = []
    original = runner.model.logits
    runner.model.logits = lambda hidden: logits.append(original(hidden)) or logits[-1]  # type: ignore[func-returns-value,method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.kv_cache_details.compactions == len(kept.events) >= least
    return output.outputs[0].token_ids, logits, kept


@pytest.mark.parametrize("policy", [POLICY, PAPER], ids=["ours", "paper"])
@pytest.mark.parametrize("checkpoint", ["llama_dir", "qwen3_dir"])
def test_decoding_equals_dense_attention_under_the_kept_set(
    checkpoint: str, policy: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(checkpoint)
    (prompt,) = random_prompts([11], seed=3)
    tokens, logits, kept = run_one(directory, policy, prompt)
    model = load_dense(directory)
    dense = dense_pass(model, prompt + tokens[:-1], kept.events).logits[len(prompt) - 1 :]
    torch.testing.assert_close(torch.cat(logits).cpu(), dense, atol=2e-4, rtol=2e-4)
    held = kept.events[-1].held
    assert (held[..., : len(prompt)] == np.arange(len(prompt))).all(), "the prompt was touched"
    assert (np.diff(held, axis=2) > 0).all()


def step_until_event(engine: LLMEngine) -> Iterator[None]:
    while engine.has_unfinished_requests:
        engine.step()
        yield


def test_prefix_buffer_and_later_entries_stay_bit_identical(llama_dir: Path) -> None:
    """Nothing but the window's older tokens is dropped; what stays is copied, never recomputed."""
    llm = LLM(str(llama_dir), policy=POLICY, dtype="float32", skip_tokenizer_init=True)
    runner, blocks = llm.engine.core.runner, llm.engine.core.scheduler.blocks
    layout, stored, events = runner.cache.layout, runner.cache.entries, 0

    def entries(length: int) -> Tensor:
        rows = torch.zeros(length, dtype=torch.long)
        lanes = torch.arange(length).expand(layout.num_layers, layout.num_kv_heads, -1)
        slots = slot_mapping(runner.batch.block_tables, rows, lanes, layout.block_size)
        return torch.stack([of(slots, None) for of in (stored.keys, stored.values)])

    before: dict[str, Tensor] = {}
    plans: list[tuple[Events, MovePlan]] = []

    def on_moves(task: Events, plan: MovePlan) -> None:
        before["entries"] = entries(int(task.old_lens.max())).clone()
        plans.append((task, plan))

    runner.compressor.on_moves = on_moves
    llm.engine.add_request(
        "a", list(range(2, 13)), SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    )
    for _ in step_until_event(llm.engine):
        if len(plans) == events:
            continue
        events = len(plans)
        task, plan = plans[-1]
        start, old, new = (
            int(x.max()) for x in (task.plan.region_start, task.old_lens, task.new_lens)
        )
        after = entries(new)
        assert torch.equal(after[:, :, :, :start], before["entries"][:, :, :, :start])
        tail = old - start - int(task.plan.windows[0]) * 16
        assert torch.equal(after[..., new - tail :, :], before["entries"][..., old - tail :, :])
        index = plan.src[0][None, ..., None].expand(2, -1, -1, -1, layout.head_dim)
        copied = before["entries"].gather(3, index)
        assert torch.equal(after[:, :, :, int(task.copy_start[0]) :], copied)
        assert int(runner.batch.kv_lens[0, 0, 0]) == int(blocks.kv_lens[0, 0, 0])
    assert events > 3


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
    plan = plan_moves(task, kept + 5, three, layout)
    assert plan.counts.tolist() == [[[6, 6]]]
    assert plan.src[0, 0].tolist() == [[5, 7, 10, 11, 12, 13], [6, 7, 8, 11, 12, 13]]


def test_scratch_is_bounded(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are observed as many at a time as the scratch holds; one at a time is no other."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompts, results = random_prompts([11, 7, 19], seed=4), []
    for scratch in (2**28, 1):
        llm = LLM(str(llama_dir), policy=POLICY, dtype="float32", skip_tokenizer_init=True)
        compressor, most = llm.engine.core.runner.compressor, 0
        monkeypatch.setattr(compressor.observer, "scratch_bytes", scratch)
        observed = compressor.observer.observe

        def watched(*args: Any) -> Iterator[tuple[slice, slice, Any, Observation]]:
            nonlocal most
            for some, layers, scores, observation in observed(*args):  # noqa: B023
                most = max(most, len(observation.keys))
                yield some, layers, scores, observation

        monkeypatch.setattr(compressor.observer, "observe", watched)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append([output.outputs[0].token_ids for output in outputs])
        assert (most == 1) == (scratch == 1)
    assert results[0] == results[1]
