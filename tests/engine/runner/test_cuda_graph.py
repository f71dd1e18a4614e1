"""Decoding by captured steps, without a GPU the same padded forwards over the same buffers; and
steps that are prepared before the one in front of them is collected: the same answers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvserve import LLM, SamplingParams
from kvserve.config import EngineConfig
from kvserve.engine.core import request_policies
from kvserve.engine.policies.registry import policy_class
from kvserve.engine.runner.model_runner import LaunchedStep
from kvserve.engine.runner.plan import make_plan
from kvserve.engine.sampling.grammar import SequenceGrammar
from kvserve.log import ConfigError
from kvserve.outputs import RequestOutput
from kvserve.sampling_params import StructuredOutput
from kvserve.scheduler.layout import Granularity
from kvserve.scheduler.messages.output import SchedulerOutput
from tests.checkpoints import random_prompts
from tests.engine.guesses import SPECULATIVE, Oracle
from tests.engine.models.decoding import make, row_of
from tests.engine.policies.cases import CASES, UNEVEN_CASES
from tests.engine.test_pressure import PROMPTS, before_steps, watch
from tests.scheduler.traffic import preempt_now_and_then
from tests.thinning import thinned

pytestmark = [pytest.mark.device, pytest.mark.compiler]  # steps of compiled kernels are recorded
SIZES = (3, 17, 40)
TOKENS = 40
KARA = {
    "name": "kara",
    "window": 20,
    "buffer": 4,
    "ratio": 0.3,
    "chunk_budget": 2,
    "max_chunk": 4,
    "period": 1,
    "query_stride": 2,
}
EVEN = [case.spec for case in CASES if case.policy != "long_entries"]


def make_llm(directory: Path, policy: Any, **settings: Any) -> LLM:
    return make(directory, policy=policy, **{"block_size": 4, "max_num_seqs": 40, **settings})


def make_plain(directory: Path, policy: Any, **settings: Any) -> LLM:
    """What others are compared with: no graphs and no overlap, on a GPU neither."""
    return make_llm(directory, policy, enforce_eager=True, async_scheduling=False, **settings)


def generate(llm: LLM, prompts: list[list[int]], policies: list[Any]) -> list[list[int]]:
    """Greedy tokens of unequal numbers; every policy compacts somebody's cache, but ``none``."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=TOKENS + i, ignore_eos=True, kv_policy=policy)
        for i, policy in enumerate(policies)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    details = [output.kv_cache_details for output in outputs]
    compacted = {each.policy for each in details if each.compactions}
    assert compacted == {each.policy for each in details} - {"none"}
    return [output.outputs[0].token_ids for output in outputs]


def count_steps(llm: LLM) -> dict[str, int]:
    """Steps that have replayed, those of them that came right behind events, that log queries, and
    where somebody sits out beside those who decode."""
    runner, counts = llm.engine.core.runner, dict.fromkeys(("all", "events", "logs", "beside"), 0)
    launch, rows = runner.launch, llm.engine.core.scheduler.rows
    assert runner.graphs is not None
    graphs = runner.graphs

    def counted(output: SchedulerOutput) -> LaunchedStep:
        before = graphs.replays
        step = launch(output)
        if graphs.replays > before:
            counts["all"] += 1
            counts["events"] += bool(output.events.compactions)
            counts["logs"] += output.logs_queries
            counts["beside"] += rows.num_rows > output.num_decoding
        return step

    runner.launch = counted  # type: ignore[method-assign]
    return counts


def follow(llm: LLM) -> list[int]:
    """How many steps were in flight as each was launched."""
    collected: list[int] = []
    depth: list[int] = []
    core = llm.engine.core
    take_in = core._take_in

    def taken(*args: Any) -> Any:
        collected.append(1)
        return take_in(*args)

    before_steps(llm, lambda _: depth.append(len(depth) - len(collected)))
    core._take_in = taken  # type: ignore[method-assign, assignment]
    return depth


MODES: dict[str, dict[str, Any]] = {
    "captured": {"cudagraph_capture_sizes": SIZES},
    "recorded": {},
    "overlapped": {"async_scheduling": True, "enforce_eager": True},
    "overlapped, captured": {"async_scheduling": True, "cudagraph_capture_sizes": SIZES},
}


@thinned({"mode": list(MODES), "layout": ["head", "model", "layer"]})
def test_every_policy_generates_what_a_plain_loop_does(
    llama_dir: Path, layout: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All policies of the layout at once, with events between replays and rows that sit out, or
    with counts that come a step late."""
    uneven = [
        spec
        for spec in UNEVEN_CASES.values()
        if policy_class(spec["name"]).granularity.fits(Granularity(layout))
    ] * (layout != "model")
    policies, overlaps = EVEN + uneven, "async_scheduling" in MODES[mode]
    if mode == "overlapped, captured":
        policies = policies[::4]
    monkeypatch.setattr(request_policies, "REMEMBERED", len(policies) + 1)
    prompts = random_prompts([37] * len(policies), seed=3)
    # All heads' queries are logged, so that requests may choose any of the cases.
    default = {"name": "snapkv", "budget": 64}
    settings: dict[str, Any] = {"kv_layout": layout, "max_num_batched_tokens": 512}
    plain = make_plain(llama_dir, default, **settings)
    llm = make_llm(llama_dir, default, **settings, **MODES[mode])
    depth = follow(llm)
    counts = {} if overlaps else count_steps(llm)
    for part in (slice(0, None, 2), slice(1, None, 2)):  # only so many policies at once
        args = prompts[part], policies[part]
        assert generate(llm, *args) == generate(plain, *args)
    if overlaps:
        assert depth.count(1) > 0.9 * len(depth)
    else:
        assert counts["all"] > 60 and counts["events"] > 40 and counts["logs"] > 40
        assert bool(counts["beside"]) == bool(uneven)
    stats, expected = llm.stats(), plain.stats()
    assert stats.compactions_total == expected.compactions_total > len(policies)
    assert stats.blocks_released_total == expected.blocks_released_total > 0
    assert stats.generation_tokens_total == expected.generation_tokens_total
    assert stats.iteration_tokens_total == expected.iteration_tokens_total, "computed in vain"
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@pytest.mark.parametrize("sizes", [SIZES, ()], ids=["captured", "recorded"])
def test_a_plan_is_made_once(
    llama_dir: Path, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step would compute from lengths cannot change in a graph: none of it may be asked. Nor
    does a tape call a layer, the second time its size comes."""
    llm = make_llm(llama_dir, KARA, cudagraph_capture_sizes=sizes)
    runner, steps = llm.engine.core.runner, 0
    generate(llm, PROMPTS, [KARA] * len(PROMPTS))
    launch = runner.launch

    def launched(output: SchedulerOutput) -> LaunchedStep:
        nonlocal steps
        if len(output.prefill.rows):
            return launch(output)
        steps += 1
        with monkeypatch.context() as patch:
            patch.setattr(type(runner.attention), "plan", None)
            if not sizes:
                patch.setattr(type(runner.model), "forward", None)
            return launch(output)

    monkeypatch.setattr(runner, "launch", launched)
    generate(llm, PROMPTS, [KARA] * len(PROMPTS))
    assert steps > TOKENS


def test_more_sequences_than_the_largest_size_decode_without(llama_dir: Path) -> None:
    llm = make_llm(llama_dir, KARA, cudagraph_capture_sizes=(2, 6))
    counts = count_steps(llm)
    tokens = generate(llm, PROMPTS, [KARA] * len(PROMPTS))
    assert 0 < counts["all"] < 12  # as the first ones end
    assert tokens == generate(make_plain(llama_dir, KARA), PROMPTS, [KARA] * len(PROMPTS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention_backend": "torch"}, "decode attention torch plans each step anew"),
        ({"enforce_eager": True}, "--enforce-eager captures no graphs"),
        ({"max_num_seqs": 2}, "all are above --max-num-seqs 2"),
    ],
    ids=["backend", "eager", "sizes"],
)
def test_sizes_that_cannot_be_captured_are_refused(
    llama_dir: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(llama_dir, **{"policy": "none", "cudagraph_capture_sizes": SIZES} | settings)


# ---- steps that are prepared before the one in front of them is collected -----------------------


def run(llm: LLM, params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)


def test_a_grammar_is_told_of_each_token_in_time() -> None:
    """The shipped model: a mask of one step is made of the tokens of the one in front of it."""
    wanted = StructuredOutput("regex", "[a-f]{2,6}=[0-9]{1,3}")
    params = SamplingParams(max_tokens=60, seed=7, structured_outputs=wanted)
    plain, overlapped = (
        LLM("kvserve/tiny", async_scheduling=on).generate(["a", "b", "c"], params, use_tqdm=False)
        for on in (False, True)
    )
    for one, other in zip(plain, overlapped, strict=True):
        assert one.outputs == other.outputs
        assert re.fullmatch(wanted.value, other.outputs[0].text)


def test_nothing_is_asked_of_a_grammar_that_has_ended() -> None:
    """The token computed in vain behind a stop token means nothing to it."""

    class Once:
        ended = False

        def fill(self, mask: Any) -> None:
            assert not self.ended

        def accept(self, token_id: int) -> bool:
            assert not self.ended
            self.ended = token_id == 2
            return True

    once: Any = Once()
    grammar = SequenceGrammar(once, (None, None), [2])
    for token in (5, 2, 7):
        grammar.fill(np.zeros(1, np.int32))
        grammar.accept(token)


def test_who_outgrows_the_pool_gets_the_token_in_flight(llama_dir: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    plain, overlapped = (
        run(make_llm(llama_dir, "none", async_scheduling=on, num_gpu_blocks_override=14), [params])
        for on in (False, True)
    )
    assert overlapped[0].outputs == plain[0].outputs
    assert len(plain[0].prompt_token_ids) + len(plain[0].outputs[0].token_ids) == 14 * 4 + 1


def test_an_abort_between_steps(llama_dir: Path) -> None:
    """Its blocks are free at once, its token in flight is nobody's, and the others go on."""
    llm = make_llm(llama_dir, KARA, async_scheduling=True)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS[:3]):
        engine.add_request(str(i), prompt, params)
    for _ in range(5):
        engine.step()
    free = llm.stats().blocks_free
    engine.abort_request("1")
    assert llm.stats().blocks_free > free
    ended: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert set(ended) == {"0", "2"}
    expected = run(make_plain(llama_dir, KARA), [params] * 3)
    for i in (0, 2):
        assert ended[str(i)].outputs == expected[i].outputs


@thinned({"layout": ["model", "head"], "sizes": [(), SIZES]})
def test_steps_overlap_while_nothing_is_guessed(
    llama_dir: Path, sizes: tuple[int, ...], layout: str
) -> None:
    """Guesses come now and then, behind known tokens; events and preemptions in either case."""
    policies = [KARA, "none", {"name": "h2o", "budget": 24}, KARA]
    if layout == "head":
        policies[1:3] = {"name": "adakv", "budget": 8, "window": 4}, {"name": "h2o", "budget": 24}
    policies, settings = policies * 2, {"kv_layout": layout, "max_num_batched_tokens": 128}
    plain = generate(make_plain(llama_dir, KARA, **settings), PROMPTS, policies)
    settings |= {"cudagraph_capture_sizes": sizes, "enforce_eager": not sizes}
    settings |= {"async_scheduling": True, "speculative_config": SPECULATIVE}
    llm = make_llm(llama_dir, KARA, **settings)
    oracle, core = Oracle(llm, plain.__getitem__, 0.7), llm.engine.core
    rng = np.random.default_rng(0)
    assert core.scheduler.speculation is not None
    enough = lambda rows: 2.0 * (rng.random() < 0.6)  # noqa: E731
    core.scheduler.speculation.enough = enough  # type: ignore[method-assign]
    preempt_now_and_then(core.scheduler, rng, 0.05)
    watch(llm)
    depth = follow(llm)
    assert generate(llm, PROMPTS, policies) == plain
    assert depth.count(1) > 10 and depth.count(0) > 20
    assert oracle.guessed > oracle.confirmed > 40
    core.scheduler.check_integrity()


@pytest.mark.parametrize("on", [None, True, False])
def test_the_startup_table_says_whether_steps_overlap(llama_dir: Path, on: bool | None) -> None:
    _, state, why = row_of(make_llm(llama_dir, "none", async_scheduling=on), "overlapped steps")
    assert state == ("on" if on else "off") and "--async-scheduling" in why


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ({}, 512, 2048),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 8}, 64, 64),
        ({"max_num_observed_tokens": 700}, 700, 700),
    ],
)
def test_events_of_a_step(llama_dir: Path, given: dict[str, Any], on_cpu: int, on_gpu: int) -> None:
    """A CPU takes one window of Kara's a step, so that a step waits for no more than that."""
    for device, most in (("cpu", on_cpu), ("cuda", on_gpu)):
        plan = make_plan(EngineConfig.from_flat(model=str(llama_dir), **given))
        assert replace(plan, device=device).max_observed_tokens == most
