"""Policies that keep unequal counts, on the real engine."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvserve import LLM, SamplingParams
from kvserve.engine.compression.moves import MovePlan
from kvserve.engine.core import request_policies
from kvserve.engine.frontend.inspect import Event, KeptPositions
from kvserve.engine.policies.registry import policy_class, policy_names
from kvserve.engine.runner.model_runner import LaunchedStep
from kvserve.log import ConfigError, RequestError
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.messages.event import Events
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts, write_checkpoint
from tests.engine.dense_reference import dense_pass, load_dense
from tests.engine.models.decoding import make
from tests.engine.models.decoding import tokens as tokens_of
from tests.engine.policies.cases import UNEVEN_BLOCK as BLOCK
from tests.engine.policies.cases import UNEVEN_CASES
from tests.thinning import thinned

(PROMPT,) = random_prompts([70], seed=8)
TOKENS = 40
EACH = pytest.mark.parametrize("label", UNEVEN_CASES)


generate = partial(tokens_of, count=TOKENS)


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    return make(directory, policy=policy, **{"block_size": BLOCK, "max_num_seqs": 16, **settings})


Alone = tuple[list[int], list[Event], torch.Tensor]


def alone(llm: LLM, prompt: list[int] = PROMPT) -> Alone:
    """Tokens, events and logits of a request that has the engine to itself."""
    runner = llm.engine.core.runner
    layout, original = runner.cache.layout, runner.model.logits
    kept, logits = KeptPositions(layout.num_layers, layout.num_kv_heads), []

    def record(hidden: torch.Tensor) -> torch.Tensor:
        logits.append(original(hidden))
        return logits[-1]

    runner.model.logits = record  # type: ignore[method-assign]
    runner.compressor.on_moves = kept.on_moves
    (tokens,) = generate(llm, [prompt])
    runner.model.logits = original  # type: ignore[method-assign]
    runner.compressor.on_moves = None
    return tokens, kept.events, torch.cat(logits).cpu()


@pytest.fixture(scope="module")
def run_alone(llama_dir: Path) -> Any:
    @cache
    def run(label: str) -> Alone:
        return alone(make_llm(llama_dir, UNEVEN_CASES[label]))

    return run


def test_every_uneven_policy_has_a_row() -> None:
    uneven = {n for n in policy_names() if policy_class(n).granularity is not Granularity.MODEL}
    assert uneven == {spec["name"] for spec in UNEVEN_CASES.values()} - {"chunkkv"}


@EACH
def test_logits_are_those_of_dense_attention_over_the_kept_sets(
    label: str, run_alone: Any, llama_dir: Path
) -> None:
    tokens, events, logits = run_alone(label)
    assert events
    counts = (events[0].held >= 0).sum(axis=2)
    if UNEVEN_CASES[label]["name"] != "adakv":
        assert (counts == counts[:, :1]).all()
    if "align" in UNEVEN_CASES[label]:
        assert (events[0].held[0] != events[0].held[1]).any(), "layers keep the same blocks"
    else:
        assert len(np.unique(counts)) > 1, "the counts do not differ"
    pruned = label == "pyramidinfer"
    dense = dense_pass(load_dense(llama_dir), PROMPT + tokens[:-1], events, pruned=pruned)
    torch.testing.assert_close(logits, dense.logits[len(PROMPT) - 1 :], atol=2e-4, rtol=2e-4)


@thinned(
    {
        "label": ["adakv", "pyramidkv", "adakv-threshold"],
        "kind,within": [("gpt-oss", 5e-4), ("gemma3", 5e-4), ("qwen3_5", 2e-3)],
    }
)
def test_so_they_are_where_other_layers_have_windows_or_states(
    kind: str, within: float, label: str, tmp_path: Path
) -> None:
    """With sinks in every softmax of gpt-oss."""
    directory = write_checkpoint(kind, tmp_path)
    tokens, events, logits = alone(make_llm(directory, UNEVEN_CASES[label]))
    assert events and len(np.unique((events[0].held >= 0).sum(axis=2))) > 1
    dense = dense_pass(load_dense(directory), PROMPT + tokens[:-1], events)
    torch.testing.assert_close(logits, dense.logits[len(PROMPT) - 1 :], atol=within, rtol=within)


@EACH
def test_exactly_the_dropped_blocks_come_free(label: str, llama_dir: Path) -> None:
    """After every event a row names ceil(kept / B) blocks in each group, and no more."""
    llm = make_llm(llama_dir, UNEVEN_CASES[label], enable_prefix_caching=False)
    core = llm.engine.core
    scheduler, compressor = core.scheduler, core.runner.compressor
    launch, seen, released = core.runner.launch, [], [0]

    def on_moves(task: Events, plan: MovePlan) -> None:
        before, after = -(-task.old_lens // BLOCK), -(-task.new_lens // BLOCK)
        and_one_more = -(-(task.new_lens + 1) // BLOCK)
        seen.append((int(before.sum()), int(after.sum()), int(and_one_more.sum())))

    def launched(output: SchedulerOutput) -> LaunchedStep:
        seen.clear()
        step = launch(output)
        if output.events.compactions or output.pruned:
            ((before, after, and_one_more),) = seen
            released.append(int(scheduler.rows.blocks_released[0]))
            assert scheduler.blocks.kv.blocks_of_rows(1)[0] == (
                after if output.pruned else and_one_more
            )
            assert released[-1] - released[-2] == before - after > 0
        return step

    compressor.on_moves, core.runner.launch = on_moves, launched  # type: ignore[method-assign]
    generate(llm, [PROMPT])
    assert len(released) > 1
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_whole_blocks_stay_where_they_are(llama_dir: Path) -> None:
    """A layer's table names the blocks it had, less the dropped ones; hits may still use those."""
    llm = make_llm(llama_dir, UNEVEN_CASES["chunkkv-blocks"])
    core = llm.engine.core
    blocks, launch, events = core.scheduler.blocks, core.runner.launch, 0
    before: Any = None

    def launched(output: SchedulerOutput) -> LaunchedStep:
        nonlocal before, events
        if output.events.observations:
            before = blocks.kv.blocks[:, 0, 0, : -(-len(PROMPT) // BLOCK)].copy()
        step = launch(output)
        for task in output.events.compactions:
            events += 1
            after = blocks.kv.blocks[:, 0, 0, : -(-int(task.new_lens[0, 0, 0]) // BLOCK)]
            for was, now in zip(before, after, strict=True):
                assert set(now) < set(was)
        return step

    core.runner.launch = launched  # type: ignore[method-assign]
    generate(llm, [PROMPT])
    assert events == 1
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.num_cached_tokens == (len(PROMPT) - 4) // BLOCK * BLOCK


def test_requests_of_all_granularities_share_a_batch(llama_dir: Path, run_alone: Any) -> None:
    """On a server with the finest layout, each is what it would have been alone."""
    policies: list[Any] = [*UNEVEN_CASES.values(), "none"]
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, kv_policy=policy)
        for policy in policies
    ]
    server = make_llm(llama_dir, UNEVEN_CASES["adakv"], max_num_batched_tokens=75)
    outputs = server.generate([PROMPT] * len(params), params, use_tqdm=False)
    for label, output in zip(UNEVEN_CASES, outputs, strict=False):
        assert output.outputs[0].token_ids == run_alone(label)[0], label
    assert outputs[-1].outputs[0].token_ids == generate(make_llm(llama_dir, "none"), [PROMPT])[0]


def test_ever_new_policies_do_not_pile_up(llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids of policies that nobody uses go to new ones, whatever kind these are."""
    monkeypatch.setattr(request_policies, "REMEMBERED", 4)
    llm = make_llm(llama_dir, UNEVEN_CASES["adakv"])
    core, expected = llm.engine.core, []
    for _ in range(2):
        for budget in range(16, 20):
            for spec in (
                {"name": "h2o", "budget": budget},
                {"name": "adakv", "budget": budget, "window": 4},
                {"name": "snapkv", "budget": budget, "window": 4},
            ):
                tokens = generate(llm, [PROMPT[:50]], kv_policy=spec)
                expected.append(tokens)
    half = len(expected) // 2
    assert expected[:half] == expected[half:]
    assert len(core.runner.policies) == 4 + 1  # the server's own stays
    assert core.runner.batch.kept_scores().nbytes == 0


def test_a_finer_policy_than_the_layout_is_refused(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, "none")
    with pytest.raises(RequestError, match="--kv-layout layer"):
        generate(llm, [PROMPT], kv_policy=UNEVEN_CASES["pyramidkv"])
    llm = make_llm(llama_dir, UNEVEN_CASES["pyramidkv"])
    with pytest.raises(RequestError, match="--kv-layout head"):
        generate(llm, [PROMPT], kv_policy=UNEVEN_CASES["adakv"])
    with pytest.raises(ConfigError, match="choose --kv-layout head or auto"):
        make_llm(llama_dir, UNEVEN_CASES["adakv"], kv_layout="layer")
